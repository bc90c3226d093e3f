# Installs the library, its headers, and what find_package and pkg-config need (component sdk), and the
# programs that were built (component tools).
include(CMakePackageConfigHelpers)

set(kvtier_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/kvtier)
set(kvtier_pkgconfig_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
get_target_property(kvtier_type kvtier TYPE)
set(kvtier_is_static FALSE)
if(kvtier_type STREQUAL "STATIC_LIBRARY")
  set(kvtier_is_static TRUE)
endif()

set_target_properties(kvtier_api PROPERTIES EXPORT_NAME api)
install(TARGETS kvtier kvtier_api EXPORT kvtierTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT sdk
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT sdk NAMELINK_COMPONENT sdk
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT sdk)
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
install(EXPORT kvtierTargets NAMESPACE kvtier:: DESTINATION ${kvtier_cmake_dir} COMPONENT sdk)

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/kvtierConfig.cmake.in
  ${PROJECT_BINARY_DIR}/package/kvtierConfig.cmake INSTALL_DESTINATION ${kvtier_cmake_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/package/kvtierConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/package/kvtierConfig.cmake
  ${PROJECT_BINARY_DIR}/package/kvtierConfigVersion.cmake
  DESTINATION ${kvtier_cmake_dir} COMPONENT sdk)

# pkg-config: an archive names what it needs in turn, a shared library has it recorded. Paths are
# relative to the .pc file, so that an installation can be moved.
file(RELATIVE_PATH kvtier_pc_prefix
  ${CMAKE_INSTALL_PREFIX}/${kvtier_pkgconfig_dir} ${CMAKE_INSTALL_PREFIX})
set(kvtier_pc_requires "")
set(kvtier_pc_libs "")
if(kvtier_is_static)
  set(kvtier_pc_requires "tbb")
  set(kvtier_pc_libs " -pthread -lstdc++ -lm")
  if(KVTIER_WITH_URING)
    string(APPEND kvtier_pc_libs " -luring")
  endif()
  if(KVTIER_WITH_CUDA)
    string(APPEND kvtier_pc_libs " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt")
  endif()
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/kvtier.pc.in ${PROJECT_BINARY_DIR}/package/kvtier.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/package/kvtier.pc DESTINATION ${kvtier_pkgconfig_dir} COMPONENT sdk)

if(TARGET kvtier_cli)
  install(FILES ${PROJECT_SOURCE_DIR}/services/systemd/kvtier.service
    DESTINATION lib/systemd/user COMPONENT tools)
endif()
foreach(program kvtier_cli kvtier_llama)
  if(TARGET ${program})
    install(TARGETS ${program} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT tools)
  endif()
endforeach()
