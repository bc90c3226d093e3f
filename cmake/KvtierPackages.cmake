# cpack: a Debian package of each component that was built, libkvtier-dev (sdk) and kvtier (tools).
#
#   cmake --build build/release && cd build/release && cpack -G DEB
set(KVTIER_PACKAGE_MAINTAINER "kvtier maintainers <maintainers@kvtier.example.org>" CACHE STRING "Maintainer of the packages that cpack makes")
string(TIMESTAMP KVTIER_PACKAGE_DATE "%a, %d %b %Y %H:%M:%S +0000" UTC)
find_program(KVTIER_GZIP gzip)

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME kvtier)
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "KV cache of long contexts off the GPU")
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_PACKAGE_CONTACT ${KVTIER_PACKAGE_MAINTAINER})
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL sdk)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
file(WRITE ${PROJECT_BINARY_DIR}/package/shlibs "libkvtier 0 libkvtier-dev (>= ${PROJECT_VERSION})\n")
file(WRITE ${PROJECT_BINARY_DIR}/package/triggers "activate-noawait ldconfig\n")
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)

set(CPACK_DEBIAN_SDK_PACKAGE_NAME libkvtier-dev)
set(CPACK_DEBIAN_SDK_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_SDK_PACKAGE_RECOMMENDS "pkg-config, libtbb-dev, libisal-dev")  # the archive's
set(CPACK_DEBIAN_SDK_PACKAGE_CONTROL_EXTRA ${PROJECT_BINARY_DIR}/package/shlibs ${PROJECT_BINARY_DIR}/package/triggers)
set(CPACK_COMPONENT_SDK_DESCRIPTION
  "The library for C++20 and C: shared library and archive, headers,\n a CMake package and pkg-config files.")
if(TARGET kvtier_client_sdk)
  set(CPACK_DEBIAN_SDK_PACKAGE_SUGGESTS "libgrpc++-dev, libprotobuf-dev, libssl-dev")
endif()

if(TARGET kvtier_cli)
  list(APPEND CPACK_COMPONENTS_ALL tools)
  set(CPACK_DEBIAN_TOOLS_PACKAGE_NAME kvtier)
  set(CPACK_DEBIAN_TOOLS_PACKAGE_SECTION science)
  set(CPACK_COMPONENT_TOOLS_DESCRIPTION
    "The server and its tools, the example decoder, manual pages and\n completions for shells.")
endif()

# What Debian wants in the documentation of a package.
configure_file(${PROJECT_SOURCE_DIR}/deploy/debian/changelog.in ${PROJECT_BINARY_DIR}/package/changelog @ONLY)
if(KVTIER_GZIP)
  execute_process(COMMAND ${KVTIER_GZIP} -9nf ${PROJECT_BINARY_DIR}/package/changelog COMMAND_ERROR_IS_FATAL ANY)
endif()
function(kvtier_package_documents component package)
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/deploy/debian/copyright
    DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/${package} COMPONENT ${component})
  if(KVTIER_GZIP)
    install(FILES ${PROJECT_BINARY_DIR}/package/changelog.gz DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/${package} COMPONENT ${component})
  endif()
endfunction()
kvtier_package_documents(sdk libkvtier-dev)
kvtier_package_documents(tools kvtier)
include(CPack)
