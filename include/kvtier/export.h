#pragma once

/// Marks a symbol as part of the public API. Everything else is hidden in a shared build.
#if defined(__GNUC__)
#define KVTIER_EXPORT __attribute__((visibility("default")))
#else
#define KVTIER_EXPORT
#endif
