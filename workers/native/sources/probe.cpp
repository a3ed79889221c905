// Minimal library, to check that the compiler, its headers, and loading the built library work here.
#include <cmath>
#include <cstdint>
#include <cstring>

extern "C" int32_t polyfleet_probe(int32_t value) { return 2 * value + 1; }
