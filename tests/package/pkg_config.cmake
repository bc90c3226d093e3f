# Compiles a program with what pkg-config says, without CMake's help, and runs it.
#
#   cmake -DPREFIX=... -DCOMPILER=... -DPKG_CONFIG=... -DSOURCE=... -DFLAGS=... -DBUILD=... [-DMODULE=kvtier] -P pkg_config.cmake
include(${CMAKE_CURRENT_LIST_DIR}/run.cmake)
string(REPLACE "|" ";" FLAGS "${FLAGS}")

if(NOT MODULE)
  set(MODULE kvtier)
endif()
file(GLOB_RECURSE pc_file ${PREFIX}/*/kvtier.pc)
get_filename_component(pc_dir ${pc_file} DIRECTORY)
execute_process(
  COMMAND ${CMAKE_COMMAND} -E env PKG_CONFIG_PATH=${pc_dir} ${PKG_CONFIG} --cflags --libs ${MODULE}
  OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")

file(MAKE_DIRECTORY ${BUILD})
run(${COMPILER} ${FLAGS} ${SOURCE} -o ${BUILD}/consumer ${flags})
cmake_path(GET pc_dir PARENT_PATH library_dir)
run(${CMAKE_COMMAND} -E env LD_LIBRARY_PATH=${library_dir} ${BUILD}/consumer)
