# Installs the library, its headers, and what find_package and pkg-config need (component sdk), and the
# programs that were built with their manual pages and completions (component tools). cpack makes a Debian package
# of each: libkvtier-dev and kvtier.
include(CMakePackageConfigHelpers)

set(kvtier_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kvtier)
set(kvtier_pkgconfig_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
set_target_properties(kvtier_api PROPERTIES EXPORT_NAME api)

if(TARGET kvtier_sdk)
  install(TARGETS kvtier EXPORT kvtierStaticTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT sdk)
  install(EXPORT kvtierStaticTargets NAMESPACE kvtier:: DESTINATION ${kvtier_cmake_dir} COMPONENT sdk)
endif()
install(TARGETS ${kvtier_shared} kvtier_api EXPORT kvtierTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT sdk NAMELINK_COMPONENT sdk
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT sdk)
install(EXPORT kvtierTargets NAMESPACE kvtier:: DESTINATION ${kvtier_cmake_dir} COMPONENT sdk)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/kvtier DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT sdk
  PATTERN admin.h EXCLUDE
  PATTERN client.h EXCLUDE
  PATTERN remote_tiers.h EXCLUDE)  # its library is not installed

# find_package(kvtier COMPONENTS client): its library needs gRPC.
if(TARGET kvtier_client_sdk)
  install(FILES ${PROJECT_SOURCE_DIR}/include/kvtier/admin.h ${PROJECT_SOURCE_DIR}/include/kvtier/client.h
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/kvtier COMPONENT sdk)
  install(TARGETS kvtier_client_sdk EXPORT kvtierClientTargets
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT sdk)
  install(EXPORT kvtierClientTargets NAMESPACE kvtier:: DESTINATION ${kvtier_cmake_dir} COMPONENT sdk)
endif()

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/kvtierConfig.cmake.in
  ${PROJECT_BINARY_DIR}/package/kvtierConfig.cmake INSTALL_DESTINATION ${kvtier_cmake_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/package/kvtierConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/package/kvtierConfig.cmake
  ${PROJECT_BINARY_DIR}/package/kvtierConfigVersion.cmake
  DESTINATION ${kvtier_cmake_dir} COMPONENT sdk)

# pkg-config. What the archive needs in turn is private (pkg-config --static); the shared library has it recorded.
# Paths are relative to the .pc file, so that an installation can be moved.
file(RELATIVE_PATH kvtier_pc_prefix
  ${CMAKE_INSTALL_PREFIX}/${kvtier_pkgconfig_dir} ${CMAKE_INSTALL_PREFIX})
set(kvtier_pc_private_libs "-pthread -lstdc++ -lm")
if(KVTIER_WITH_URING)
  string(APPEND kvtier_pc_private_libs " -luring")
endif()
if(KVTIER_WITH_CUDA)
  string(APPEND kvtier_pc_private_libs " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt")
endif()
set(kvtier_pc_files kvtier.pc)
if(TARGET kvtier_client_sdk)
  list(APPEND kvtier_pc_files kvtier-client.pc)
endif()
foreach(file IN LISTS kvtier_pc_files)
  configure_file(${PROJECT_SOURCE_DIR}/cmake/${file}.in ${PROJECT_BINARY_DIR}/package/${file} @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/package/${file} DESTINATION ${kvtier_pkgconfig_dir} COMPONENT sdk)
endforeach()

if(TARGET kvtier_cli)
  install(FILES ${PROJECT_SOURCE_DIR}/services/systemd/kvtier.service
    DESTINATION lib/systemd/user COMPONENT tools)
  install(DIRECTORY $<TARGET_FILE_DIR:kvtier_cli>/manual/ DESTINATION ${CMAKE_INSTALL_DATADIR} COMPONENT tools)
endif()
if(TARGET kvtier_llama)
  set(kvtier_llama_page ${PROJECT_BINARY_DIR}/package/kvtier-llama.1)
  find_program(KVTIER_GZIP gzip)
  add_custom_target(kvtier_llama_page ALL
    COMMAND ${CMAKE_COMMAND} -DPROGRAM=$<TARGET_FILE:kvtier_llama> -DNAME=kvtier-llama "-DCOMMANDS=eval;generate;record;bench"
      -DVERSION=${PROJECT_VERSION} -DOUTPUT=${kvtier_llama_page} "-DGZIP=$<$<BOOL:${KVTIER_GZIP}>:${KVTIER_GZIP}>"
      -P ${PROJECT_SOURCE_DIR}/cmake/KvtierHelpPage.cmake
    DEPENDS kvtier_llama VERBATIM)
  if(KVTIER_GZIP)
    string(APPEND kvtier_llama_page .gz)
  endif()
  install(FILES ${kvtier_llama_page} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT tools OPTIONAL)
endif()
foreach(program kvtier_cli kvtier_llama)
  if(TARGET ${program})
    install(TARGETS ${program} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT tools)
  endif()
endforeach()

include(cmake/KvtierPackages.cmake)
