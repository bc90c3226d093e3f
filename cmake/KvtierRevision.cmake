# Writes OUTPUT, a header with the revision of SOURCE, when it has changed: cmake -DSOURCE=... -DOUTPUT=... -P this.
set(revision "")
find_program(git git)
if(git)
  execute_process(COMMAND ${git} -c safe.directory=* describe --always --dirty --abbrev=12 --exclude=*
    WORKING_DIRECTORY ${SOURCE} OUTPUT_VARIABLE revision OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(NOT revision)
  set(revision unknown)
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "#pragma once\n\n#define KVTIER_REVISION \"${revision}\"\n")
