// What this machine can do at most: bytes read and bf16 products per second, on as many threads as the argument says.
// Prints JSON. The peer bench compiles and runs it; it is no part of the engine.

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__AVX512BF16__) || defined(__AVX2__)
#include <immintrin.h>
#endif

enum { NUM_TURNS = 9, NUM_CHAINS = 16, NUM_PRODUCTS = 4000000, MAX_THREADS = 64 };
static const size_t num_bytes = (size_t)512 << 20;  // per thread; beyond any cache share

static const size_t ahead = 128;  // lines

typedef uint64_t lanes __attribute__((vector_size(64)));
static pthread_barrier_t barrier;
static int num_threads;
static double read_s[NUM_TURNS], product_s[NUM_TURNS];
static volatile float keep;

static double now(void) {
  struct timespec time;
  // One thread is measured as the bench measures one: in CPU time, which other work disturbs least.
  clock_gettime(num_threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static uint64_t read_all(const lanes* data) {
  lanes sum[4] = {{0}};
  for (size_t i = 0; i < num_bytes / sizeof(lanes); i += 4)
    for (int j = 0; j < 4; ++j) {
      __builtin_prefetch(&data[i + j + ahead], 0, 2);  // across pages, where the hardware stops
      sum[j] ^= data[i + j];
    }
  sum[0] ^= sum[1] ^ sum[2] ^ sum[3];
  return sum[0][0] ^ sum[0][7];
}

// Independent chains, so that latency does not count. Returns the products of one call per chain.
static int multiply_all(void) {
#if defined(__AVX512BF16__)
  __m512 sums[NUM_CHAINS];
  const __m512bh one = (__m512bh)_mm512_set1_epi32(0x3f803f80 + num_threads);
  for (int j = 0; j < NUM_CHAINS; ++j) sums[j] = _mm512_setzero_ps();
  for (int i = 0; i < NUM_PRODUCTS; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < NUM_CHAINS; ++j) {
      sums[j] = _mm512_dpbf16_ps(sums[j], one, one);
      __asm__ volatile("" : "+v"(sums[j]));
    }
  for (int j = 0; j < NUM_CHAINS; ++j) keep += _mm512_cvtss_f32(sums[j]);
  return 32;
#elif defined(__AVX2__) && defined(__FMA__)
  __m256 sums[12];
  const __m256 one = _mm256_set1_ps((float)num_threads);
  for (int j = 0; j < 12; ++j) sums[j] = _mm256_setzero_ps();
  for (int i = 0; i < NUM_PRODUCTS * NUM_CHAINS / 12; ++i)
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) {
      sums[j] = _mm256_fmadd_ps(one, one, sums[j]);
      __asm__ volatile("" : "+x"(sums[j]));
    }
  for (int j = 0; j < 12; ++j) keep += _mm256_cvtss_f32(sums[j]);
  return 8;
#else
  return 0;
#endif
}

static void* run(void* argument) {
  const int number = (int)(intptr_t)argument;
  lanes* data = aligned_alloc(64, num_bytes);
  memset(data, number + 1, num_bytes);
  intptr_t products = 0;
  for (int turn = 0; turn < NUM_TURNS; ++turn) {
    pthread_barrier_wait(&barrier);
    double start = now();
    keep += (float)read_all(data);
    pthread_barrier_wait(&barrier);
    read_s[turn] = now() - start;  // every thread writes about the same
    start = now();
    products = multiply_all();
    pthread_barrier_wait(&barrier);
    product_s[turn] = now() - start;
  }
  free(data);
  return (void*)products;
}

static double least(const double* values) {
  double found = values[0];
  for (int i = 1; i < NUM_TURNS; ++i) found = values[i] < found ? values[i] : found;
  return found;
}

int main(int argc, char** argv) {
  num_threads = argc > 1 ? atoi(argv[1]) : 1;
  if (num_threads < 1 || num_threads > MAX_THREADS) return 2;
  pthread_t threads[MAX_THREADS];
  pthread_barrier_init(&barrier, NULL, (unsigned)num_threads);
  for (intptr_t i = 0; i < num_threads; ++i) pthread_create(&threads[i], NULL, run, (void*)i);
  void* products = NULL;
  for (int i = 0; i < num_threads; ++i) pthread_join(threads[i], &products);
  const double flop = 2.0 * num_threads * NUM_CHAINS * (double)NUM_PRODUCTS * (double)(intptr_t)products;
  printf("{\"read_gb_per_s\": %.2f, \"gflop_per_s\": %.1f}\n", 1e-9 * num_threads * (double)num_bytes / least(read_s),
         1e-9 * flop / least(product_s));
  return 0;
}
