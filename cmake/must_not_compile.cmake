# cmake -DCOMPILER=… -DFLAGS=… -DFILE=… -P must_not_compile.cmake: ends well if the compiler finds each line of FILE
# that says "unguarded", and nothing else.
execute_process(COMMAND ${COMPILER} ${FLAGS} ${FILE} RESULT_VARIABLE failed ERROR_VARIABLE said)
file(STRINGS ${FILE} wrong REGEX "// unguarded")
list(LENGTH wrong expected)
string(REGEX MATCHALL "Werror,-Wthread-safety" found "${said}")
list(LENGTH found count)
if(failed EQUAL 0 OR NOT count EQUAL expected)
  message(FATAL_ERROR "${count} of ${expected} unguarded accesses were found in ${FILE}:\n${said}")
endif()
