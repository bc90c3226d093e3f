# Compiles the C++ block of the README inside a function.
#
#   cmake -DPREFIX=... -DCOMPILER=... -DREADME=... -DBUILD=... -P readme_example.cmake
include(${CMAKE_CURRENT_LIST_DIR}/run.cmake)

file(READ ${README} text)
string(REGEX REPLACE ".*\n```cpp\n" "" code "${text}")
string(REGEX REPLACE "\n```.*" "" code "${code}")
if(NOT code MATCHES "kvtier::Engine")
  message(FATAL_ERROR "no C++ block with a kvtier::Engine in ${README}")
endif()
file(WRITE ${BUILD}/example.cc "${code}\n")
run(${COMPILER} -std=c++20 -Wall -Wextra -Werror -I${PREFIX}/include -fsyntax-only ${BUILD}/example.cc)
