# Has the program write its manual pages and its completions for shells, below OUTPUT as they are installed below share.
#
#   cmake -DPROGRAM=... "-DCOMMANDS=replay;serve" -DOUTPUT=... [-DGZIP=gzip] -P KvtierManual.cmake
function(write path)
  cmake_path(GET path PARENT_PATH folder)
  file(MAKE_DIRECTORY ${OUTPUT}/${folder})
  execute_process(COMMAND ${PROGRAM} ${ARGN} OUTPUT_FILE ${OUTPUT}/${path} COMMAND_ERROR_IS_FATAL ANY)
  if(GZIP AND path MATCHES "^man/")
    execute_process(COMMAND ${GZIP} -9nf ${OUTPUT}/${path} COMMAND_ERROR_IS_FATAL ANY)
  endif()
endfunction()

write(bash-completion/completions/kvtier completion bash)
write(zsh/vendor-completions/_kvtier completion zsh)
write(fish/vendor_completions.d/kvtier.fish completion fish)
write(man/man1/kvtier.1 man)
foreach(command IN LISTS COMMANDS)
  write(man/man1/kvtier-${command}.1 man ${command})
endforeach()
