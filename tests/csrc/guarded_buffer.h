// Memory with an inaccessible page directly after its last byte, or before its first: one byte too far is a SIGSEGV.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace blockscale::test {

enum class Guard { kAfter, kBefore };

template <class T>
class GuardedBuffer {
 public:
  GuardedBuffer(int64_t count, Guard guard) : count_(count) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    const size_t room = (bytes + page - 1) / page * page;
    mapped_ = room + 2 * page;  // the page on the other side is guarded too; slack lies between it and the data
    base_ = static_cast<unsigned char*>(mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED || (room && mprotect(base_ + page, room, PROT_READ | PROT_WRITE) != 0)) abort();
    memset(base_ + page, 0xa5, room);
    data_ = reinterpret_cast<T*>(base_ + page + (guard == Guard::kAfter ? room - bytes : 0));
  }
  ~GuardedBuffer() { munmap(base_, mapped_); }
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  int64_t size() const { return count_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }
  T* begin() { return data_; }
  T* end() { return data_ + count_; }

 private:
  int64_t count_;
  size_t mapped_;
  unsigned char* base_;
  T* data_;
};

}  // namespace blockscale::test
