# Compiles the C++ program of the README with what pkg-config says, and runs it.
#
#   cmake -DPREFIX=... -DCOMPILER=... -DPKG_CONFIG=... -DREADME=... -DBUILD=... -P readme_example.cmake
file(READ ${README} text)
string(REGEX REPLACE ".*\n```cpp\n" "" code "${text}")
string(REGEX REPLACE "\n```.*" "" code "${code}")
if(NOT code MATCHES "int main" OR NOT code MATCHES "kvtier::Engine")
  message(FATAL_ERROR "expected a C++ program with a kvtier::Engine in ${README}, found none")
endif()
file(WRITE ${BUILD}/example.cc "${code}\n")
set(SOURCE ${BUILD}/example.cc)
set(FLAGS "-std=c++20|-Wall|-Wextra|-Werror")
include(${CMAKE_CURRENT_LIST_DIR}/pkg_config.cmake)
