#pragma once

/// "major.minor.patch"; the same as in CMakeLists.txt, which a test checks.
#define KVTIER_VERSION "0.1.0"
