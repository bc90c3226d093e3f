#pragma once

/* What tests/runtime/c_api/c_api_compiles.c, which a C compiler reads, offers to the C++ tests. */
#ifdef __cplusplus
extern "C" {
#endif

/* Fills a bf16 sequence of 70 tokens, decodes one more and closes everything, in C. Returns the
 * first status that is not KVTIER_OK, as a number; `out` takes 64 floats. */
int c_round_trip(int backend, float* out);

/* kvtier_status_name of any number, which only C may pass. */
const char* c_status_name(int number);

#ifdef __cplusplus
}
#endif
