# Generates the Python stubs anew and compares them with those of the tree.
#
#   cmake -DPROTOC= -DPLUGIN= -DPROTO_DIR= -DSTUBS_DIR= -DWORK_DIR= -P stubs.cmake

file(REMOVE_RECURSE ${WORK_DIR})
file(MAKE_DIRECTORY ${WORK_DIR})
file(GLOB protos RELATIVE ${PROTO_DIR} ${PROTO_DIR}/kvtier/v1/*.proto)
execute_process(
  COMMAND ${PROTOC} --proto_path=${PROTO_DIR} --python_out=${WORK_DIR} --pyi_out=${WORK_DIR} --grpc_python_out=${WORK_DIR}
    --plugin=protoc-gen-grpc_python=${PLUGIN} ${protos}
  COMMAND_ERROR_IS_FATAL ANY)
file(GLOB fresh RELATIVE ${WORK_DIR} ${WORK_DIR}/kvtier/v1/*_pb2*)
file(GLOB kept RELATIVE ${STUBS_DIR} ${STUBS_DIR}/kvtier/v1/*_pb2*)
if(NOT fresh STREQUAL kept)
  message(FATAL_ERROR "python/kvtier/v1: expected ${fresh}, found ${kept}; build the target update_descriptor_set")
endif()
foreach(name IN LISTS fresh)
  execute_process(COMMAND ${CMAKE_COMMAND} -E compare_files ${WORK_DIR}/${name} ${STUBS_DIR}/${name} RESULT_VARIABLE differs)
  if(differs)
    message(FATAL_ERROR "python/${name}: expected what proto/ gives, found another; build the target update_descriptor_set")
  endif()
endforeach()
