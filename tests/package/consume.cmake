# Configures, builds and runs a consumer project.
#
#   cmake -DSOURCE=... -DBUILD=... [-DPREFIX=...] [-DINSTALL_TO=...] "-DOPTIONS=-D...|-D..." -P consume.cmake
#
# PREFIX is where find_package looks; INSTALL_TO installs the kvtier that the project built.
include(${CMAKE_CURRENT_LIST_DIR}/run.cmake)
string(REPLACE "|" ";" OPTIONS "${OPTIONS}")

file(REMOVE_RECURSE ${BUILD} ${INSTALL_TO})
run(${CMAKE_COMMAND} -S ${SOURCE} -B ${BUILD} ${OPTIONS} -DCMAKE_PREFIX_PATH=${PREFIX})
run(${CMAKE_COMMAND} --build ${BUILD} --parallel 2)
if(INSTALL_TO)
  run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${INSTALL_TO} --component sdk)
endif()
run(${BUILD}/consumer)
