// Process stored bytes in one pass: read, hash, convert and count them while they are in the processor's cache.
//
// Bytes in the page cache are mapped, at most 8 MiB at a time, which avoids a copy; others are read. If a mapped page
// is not available because the file was truncated or the disk fails, SIGBUS ends that attempt, and the same bytes are
// read instead, which reports the error.
#include <cerrno>
#include <csetjmp>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include "floats.hpp"
#include "xxh3.hpp"

namespace {

constexpr size_t BLOCK = 4 << 10;       // hashed, then converted, both from the L1 cache
constexpr size_t READ = 512 << 10;      // read at once: fits the L2 cache
constexpr size_t PROBED = 512 << 10;    // one page per this many bytes is looked up in the page cache
constexpr size_t STREAMED = 256 << 10;  // parts of at least this size are written without caching

// SIGBUS

thread_local sigjmp_buf* rescue = nullptr;
std::mutex guarding;
int guarded = 0;
struct sigaction earlier;

void on_bus_error(int number, siginfo_t* info, void* context) {
  if (rescue) siglongjmp(*rescue, 1);
  if (earlier.sa_flags & SA_SIGINFO) return earlier.sa_sigaction(number, info, context);
  if (earlier.sa_handler != SIG_DFL && earlier.sa_handler != SIG_IGN) return earlier.sa_handler(number);
  signal(number, SIG_DFL);  // the access is retried and ends the process, as without us
}

// Installs our handler while it exists; then restores the previous one, unless another was installed since.
struct Guard {
  Guard() {
    const std::lock_guard<std::mutex> lock(guarding);
    if (guarded++) return;
    struct sigaction ours = {};
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigaction(SIGBUS, &ours, &earlier);
  }
  ~Guard() {
    const std::lock_guard<std::mutex> lock(guarding);
    if (--guarded) return;
    struct sigaction now;
    sigaction(SIGBUS, nullptr, &now);
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus_error) sigaction(SIGBUS, &earlier, nullptr);
  }
};

// Writing

void copy_streamed(uint8_t* to, const uint8_t* from, size_t size) {
#if defined(__AVX2__)
  size_t head = -reinterpret_cast<uintptr_t>(to) & 31;
  head = head < size ? head : size;
  std::memcpy(to, from, head);
  to += head, from += head, size -= head;
  for (; size >= 32; to += 32, from += 32, size -= 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
#endif
  std::memcpy(to, from, size);
}

void writes_are_done() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

struct Work {
  xxh3::State* hash;        // or nullptr
  floats::Convert convert;  // or nullptr: bytes are copied
  size_t from_bytes, to_bytes;
  uint8_t* target;  // or nullptr: nothing is stored
  floats::Change* change;
  bool streamed;

  void block(const uint8_t* data, size_t size) {
    alignas(64) uint8_t proved[BLOCK];
    if (hash && target && target != data) {  // store what was hashed, even if the file is written now
      std::memcpy(proved, data, size);
      data = proved;
    }
    if (hash) hash->update(data, size);
    if (convert) {
      alignas(64) uint8_t made[4 * BLOCK];
      const size_t n = size / from_bytes;
      const bool aside = streamed || !target;
      convert(data, aside ? made : target, n, change);
      if (target && aside) copy_streamed(target, made, n * to_bytes);
      if (target) target += n * to_bytes;
    } else if (target) {
      if (target != data) streamed ? copy_streamed(target, data, size) : (void)std::memcpy(target, data, size);
      target += size;
    }
  }

  void all(const uint8_t* data, size_t size) {
    for (size_t at = 0; at < size; at += BLOCK) block(data + at, size - at < BLOCK ? size - at : BLOCK);
  }
};

// Reading

bool in_page_cache(int descriptor, int64_t offset, size_t size) {
#if defined(__linux__) && defined(RWF_NOWAIT)
  uint8_t byte;
  const iovec one = {&byte, 1};
  for (size_t at = 0; at < size; at += PROBED) {
    if (preadv2(descriptor, &one, 1, offset + static_cast<int64_t>(at), RWF_NOWAIT) != 1) return false;
  }
  return preadv2(descriptor, &one, 1, offset + static_cast<int64_t>(size) - 1, RWF_NOWAIT) == 1;
#else
  return false;
#endif
}

// Returns false if the bytes must be read: they are not mapped, or a page is not available. Discard `work` then.
__attribute__((noinline)) bool mapped(int descriptor, int64_t offset, size_t size, Work* work) {
  const int64_t page = sysconf(_SC_PAGESIZE), begin = offset / page * page;
  const size_t length = size + static_cast<size_t>(offset - begin);
  void* const memory = mmap(nullptr, length, PROT_READ, MAP_SHARED, descriptor, begin);
  if (memory == MAP_FAILED) return false;
  const Guard guard;
  sigjmp_buf here;
  const bool whole = sigsetjmp(here, 0) == 0;
  if (whole) {
    rescue = &here;
    work->all(static_cast<const uint8_t*>(memory) + (offset - begin), size);
  }
  rescue = nullptr;
  munmap(memory, length);
  return whole;
}

// Returns the number of bytes read into `into`, fewer at the end of the file, or -errno.
int64_t filled(int descriptor, uint8_t* into, size_t size, int64_t offset) {
  size_t done = 0;
  while (done < size) {
    const ssize_t count = pread(descriptor, into + done, size - done, offset + static_cast<int64_t>(done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return -errno;
    if (count == 0) break;
    done += static_cast<size_t>(count);
  }
  return static_cast<int64_t>(done);
}

struct Scratch {
  uint8_t* memory = static_cast<uint8_t*>(std::aligned_alloc(4096, READ));
  ~Scratch() { std::free(memory); }
};

int64_t read_through(int descriptor, int64_t offset, size_t size, Work* work, int64_t* at) {
  static thread_local Scratch scratch;
  if (!scratch.memory) return -ENOMEM;
  for (size_t done = 0; done < size; done += READ) {
    const size_t now = size - done < READ ? size - done : READ;
    uint8_t* const into = work->target && !work->convert ? work->target : scratch.memory;
    *at = offset + static_cast<int64_t>(done);
    const int64_t count = filled(descriptor, into, now, *at);
    if (count < 0) return count;
    if (static_cast<size_t>(count) < now) return *at += count, 1;
    work->all(into, now);
  }
  return 0;
}

}  // namespace

extern "C" {

int64_t polyfleet_hash_bytes() { return sizeof(xxh3::State) + 64; }

static xxh3::State* state_in(uint8_t* memory) {
  return reinterpret_cast<xxh3::State*>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64);
}

void polyfleet_hash_begin(uint8_t* memory) { state_in(memory)->begin(); }
void polyfleet_hash_update(uint8_t* memory, const uint8_t* data, uint64_t size) { state_in(memory)->update(data, size); }
void polyfleet_hash_digest(uint8_t* memory, uint8_t* out) { state_in(memory)->digest(out); }

// Processes `size` bytes of a file from `offset` on: hashes them if `hash` is set, and converts them (copies them if
// `from` is -1) to `target` if that is set. Returns 0; 1 if the file ends at *at; -errno if it cannot be read at *at.
int64_t polyfleet_pass(int32_t descriptor, int64_t offset, uint64_t size, uint8_t* hash, int32_t from, int32_t to,
                       uint8_t* target, floats::Change* change, int64_t* at) {
  xxh3::State* const state = hash ? state_in(hash) : nullptr;
  Work work = {state, nullptr, 1, 1, target, change, size >= STREAMED};
  if (from >= 0) {
    work.convert = floats::chosen(from, to);
    work.from_bytes = floats::bytes_of(from), work.to_bytes = floats::bytes_of(to);
  }
  int64_t result = 0;
  bool whole = false;
  if (size && in_page_cache(descriptor, offset, size)) {
    const xxh3::State before_hash = state ? *state : xxh3::State();
    const floats::Change before = change ? *change : floats::Change();
    Work first = work;
    whole = mapped(descriptor, offset, size, &first);
    if (!whole && state) *state = before_hash;
    if (!whole && change) *change = before;
  }
  if (!whole) result = read_through(descriptor, offset, size, &work, at);
  writes_are_done();
  return result;
}

// Returns 1 if an entire part of a file can be read by mapping it, 0 if a page of it cannot.
int32_t polyfleet_maps(int32_t descriptor, int64_t offset, uint64_t size) {
  xxh3::State state;
  state.begin();
  Work work = {&state, nullptr, 1, 1, nullptr, nullptr, false};
  return mapped(descriptor, offset, size, &work);
}

// Converts `n` values in memory. Returns 0, or 1 for unknown dtypes. `to_memory` may be null: only counts then.
int32_t polyfleet_convert(const uint8_t* from_memory, uint8_t* to_memory, uint64_t n, int32_t from, int32_t to,
                          floats::Change* change) {
  const floats::Convert convert = floats::chosen(from, to);
  if (!convert) return 1;
  const size_t size = n * floats::bytes_of(from);
  Work work = {nullptr, convert, floats::bytes_of(from), floats::bytes_of(to), to_memory, change, size >= STREAMED};
  work.all(from_memory, size);
  writes_are_done();
  return 0;
}

// Copies and hashes bytes. `hash` may be null.
void polyfleet_copy(const uint8_t* from, uint8_t* to, uint64_t size, uint8_t* hash) {
  Work work = {hash ? state_in(hash) : nullptr, nullptr, 1, 1, to, nullptr, size >= STREAMED};
  work.all(from, size);
  writes_are_done();
}
}
