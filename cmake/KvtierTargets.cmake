# Helpers that give every target of the project the same warnings and sanitizers.

add_library(kvtier_warnings INTERFACE)
set(kvtier_warning_flags -Wall -Wextra -Wshadow -Wconversion -Wsign-conversion -Wnon-virtual-dtor
    -Woverloaded-virtual -Wold-style-cast -Wimplicit-fallthrough)
target_compile_options(kvtier_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:${kvtier_warning_flags} -Wpedantic -fopenmp-simd>
  # nvcc's host pass sees its own generated code, so only the flags that survive it.
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Wshadow --expt-relaxed-constexpr -lineinfo
    -Xcudafe=--diag_suppress=20012>)
if(KVTIER_WERROR)
  target_compile_options(kvtier_warnings INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Werror> $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
endif()
# g++ 12 reports false positives of these two in std::string and std::vector at -O2 and above.
target_compile_options(kvtier_warnings INTERFACE
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-restrict -Wno-stringop-overflow>)

if(KVTIER_SANITIZE STREQUAL "address")
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=address,undefined>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=all>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>)
  add_compile_definitions(_GLIBCXX_ASSERTIONS GRPC_ASAN_SUPPRESSED)
  # g++ 12 reports false positives inside <regex> in instrumented code.
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wno-maybe-uninitialized>)
  add_link_options(-fsanitize=address,undefined)
elseif(KVTIER_SANITIZE STREQUAL "thread")
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=thread>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>)
  # TBB's fences are invisible to TSan, so parallel_for runs on plain threads there; Asio's are left out, its
  # queues have mutexes.
  add_compile_definitions(GRPC_TSAN_SUPPRESSED KVTIER_PLAIN_THREADS BOOST_ASIO_DISABLE_FENCED_BLOCK)
  add_link_options(-fsanitize=thread)
elseif(KVTIER_SANITIZE)
  message(FATAL_ERROR "KVTIER_SANITIZE: expected empty, address or thread, found ${KVTIER_SANITIZE}")
endif()

# kvtier_light_compiles(TARGET...): code that no decode step waits for, with headers that are slow to compile. With
# KVTIER_QUICK a release build hardly optimises it and a sanitizer's not at all. With AddressSanitizer,
# UndefinedBehaviorSanitizer leaves out what that sees too.
set(kvtier_without_twice_seen $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize=null,alignment,object-size,vptr>)
function(kvtier_light_compiles)
  foreach(target IN LISTS ARGN)
    if(KVTIER_QUICK)
      target_compile_options(${target} PRIVATE $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:-O1>
        $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:RelWithDebInfo>>:-O0>)
    endif()
    if(KVTIER_SANITIZE STREQUAL "address")
      target_compile_options(${target} PRIVATE ${kvtier_without_twice_seen})
    endif()
  endforeach()
endfunction()

# kvtier_few_compiles(TARGET...): sources that see the headers of gRPC, protobuf, Asio, GoogleTest, CLI11 or JSON.
# Most of the time of compiling one goes to the same templates again and again, so with KVTIER_UNITY several are
# compiled as one.
function(kvtier_few_compiles)
  if(KVTIER_UNITY)
    set_target_properties(${ARGN} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
    foreach(target IN LISTS ARGN)
      # Meant for headers that define types of anonymous namespaces, which these sources are not.
      target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
    endforeach()
  endif()
endfunction()

# kvtier_module(NAME n HEADERS ... SOURCES ... CUDA ... DEPS ...)
#
# A module: a static library kvtier_<n> whose headers are checked to compile alone. CUDA sources, and
# `*_cuda.cc` files, are left out of a build without CUDA.
function(kvtier_module)
  cmake_parse_arguments(arg "" "NAME" "HEADERS;SOURCES;CUDA;DEPS" ${ARGN})
  set(target kvtier_${arg_NAME})
  add_library(${target} STATIC ${arg_SOURCES})
  target_sources(${target} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR} FILES ${arg_HEADERS})
  target_link_libraries(${target} PUBLIC kvtier_api ${arg_DEPS} PRIVATE kvtier_warnings)
  if(KVTIER_WITH_CUDA)
    target_sources(${target} PRIVATE ${arg_CUDA})
    target_compile_definitions(${target} PUBLIC KVTIER_WITH_CUDA)
    if(arg_CUDA)
      target_link_libraries(${target} PRIVATE CUDA::cudart_static)
    endif()
  endif()
endfunction()

# kvtier_merge_modules(target modules...): makes `target` the library of those modules' objects, with the
# public API as its only public dependency. A shared one exports what cmake/kvtier.map lists.
function(kvtier_merge_modules target)
  foreach(module IN LISTS ARGN)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:kvtier_${module}>)
  endforeach()
  target_link_libraries(${target} PUBLIC kvtier_api PRIVATE Threads::Threads TBB::tbb isal)
  if("file_tier" IN_LIST ARGN AND KVTIER_WITH_URING)
    target_link_libraries(${target} PRIVATE uring)
  endif()
  if(KVTIER_WITH_CUDA)
    target_link_libraries(${target} PRIVATE CUDA::cudart_static)
  endif()
  set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "SHARED_LIBRARY")
    set(map ${PROJECT_SOURCE_DIR}/cmake/kvtier.map)
    target_link_options(${target} PRIVATE -Wl,--exclude-libs,ALL -Wl,--version-script=${map})
    set_target_properties(${target} PROPERTIES LINK_DEPENDS ${map})
  endif()
endfunction()

# kvtier_test(NAME n [APART] SOURCES ... DEPS ... LABELS ...): a GoogleTest binary n, its cases found when ctest
# runs, so that no GPU binary is started by the build. APART: sources that name things alike, never compiled together.
function(kvtier_test)
  cmake_parse_arguments(arg "APART" "NAME" "SOURCES;DEPS;LABELS;ENVIRONMENT" ${ARGN})
  add_executable(${arg_NAME} ${arg_SOURCES})
  target_link_libraries(${arg_NAME} PRIVATE ${arg_DEPS} GTest::gmock GTest::gtest_main kvtier_warnings)
  if(NOT arg_APART)
    kvtier_few_compiles(${arg_NAME})
  endif()
  if("service" IN_LIST arg_LABELS)
    kvtier_light_compiles(${arg_NAME})
  endif()
  if("gpu" IN_LIST arg_LABELS AND NOT "kvtier_llama_test_support" IN_LIST arg_DEPS)
    set_property(GLOBAL APPEND PROPERTY KVTIER_GPU_TESTS ${arg_NAME})
  endif()
  set(environment "")
  if(arg_ENVIRONMENT)
    set(environment ENVIRONMENT "${arg_ENVIRONMENT}")
  endif()
  gtest_discover_tests(${arg_NAME} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 120
    PROPERTIES TIMEOUT 600 ${environment})
  # gtest_discover_tests takes one label only, so they are set once its cases are known.
  set(labels ${CMAKE_CURRENT_BINARY_DIR}/${arg_NAME}_labels.cmake)
  file(WRITE ${labels} "if(${arg_NAME}_TESTS)
  set_tests_properties(\${${arg_NAME}_TESTS} PROPERTIES LABELS \"${arg_LABELS}\")
endif()
")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${labels})
endfunction()
