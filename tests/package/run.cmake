# run(COMMAND...): runs it, prints what it printed, and fails with it.
function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE result ECHO_OUTPUT_VARIABLE ECHO_ERROR_VARIABLE)
  if(result)
    list(JOIN ARGV " " command)
    message(FATAL_ERROR "exit status ${result}: ${command}")
  endif()
endfunction()
