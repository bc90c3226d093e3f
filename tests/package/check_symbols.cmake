# Fails unless a shared library exports kvtier's C++ API and C ABI, and nothing else.
#
#   cmake -DNM=... -DLIBRARY=... -P check_symbols.cmake
execute_process(COMMAND ${NM} -D --defined-only --format=posix ${LIBRARY}
  OUTPUT_VARIABLE listing COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^\n]+" lines "${listing}")

set(public "^(_ZNK?6kvtier|_ZT[ISV]N6kvtier|kvtier_|KVTIER_0)")
set(modules "6kvtier(8transfer|7hashing|7scoring|9attention|7runtime|5tiers)")
foreach(line IN LISTS lines)
  string(REGEX REPLACE "[ @].*" "" symbol "${line}")
  if(NOT symbol MATCHES "${public}" OR symbol MATCHES "${modules}")
    message(SEND_ERROR "exported, but not public: ${symbol}")
  endif()
endforeach()

foreach(required _ZN6kvtier6EngineC1ERKNS_6ConfigE _ZTIN6kvtier5ErrorE kvtier_engine_create)
  if(NOT listing MATCHES "(^|\n)${required}[ @]")
    message(SEND_ERROR "public, but not exported: ${required}")
  endif()
endforeach()
list(LENGTH lines count)
message(STATUS "${count} exported symbols")
