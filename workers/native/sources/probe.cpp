// The smallest library there is: shows that a compiler, its headers, and loading what it built all work here.
#include <cmath>
#include <cstdint>
#include <cstring>

extern "C" int32_t polyfleet_probe(int32_t value) { return 2 * value + 1; }
