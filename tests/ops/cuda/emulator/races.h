// What ThreadSanitizer is told of the emulator: which fiber runs, what orders the memory accesses of fibers, and which
// accesses are the emulator's own. Nothing in a build without -fsanitize=thread.
//
// Fibers are threads to it that only barriers order, so a race is reported whatever the order that they run in.
#ifndef FASER_CUDA_EMULATOR_RACES_H_
#define FASER_CUDA_EMULATOR_RACES_H_

#ifdef __SANITIZE_THREAD__
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

#define FASER_UNSANITIZED __attribute__((no_sanitize("thread")))

namespace emulator {

#ifdef __SANITIZE_THREAD__

inline void* this_fiber() { return __tsan_get_current_fiber(); }
inline void* new_fiber() { return __tsan_create_fiber(0); }
constexpr unsigned kOrdersNothing = 1;
inline void switch_to(void* fiber) { __tsan_switch_to_fiber(fiber, kOrdersNothing); }

// What was done before release(place) is seen by who has called acquire(place) after it.
inline void release(char* place) { __tsan_release(place); }
inline void acquire(char* place) { __tsan_acquire(place); }

// The emulator's own bookkeeping while it lives, by the fiber that made it: no part of the kernel.
struct Unseen {
  Unseen() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unseen() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
};

#else

inline void* this_fiber() { return nullptr; }
inline void* new_fiber() { return nullptr; }
inline void switch_to(void*) {}
inline void release(char*) {}
inline void acquire(char*) {}
struct Unseen {
  ~Unseen() {}  // used, as far as a compiler can tell
};

#endif

}  // namespace emulator

#endif  // FASER_CUDA_EMULATOR_RACES_H_
