// Loops over requests, on the pool if the work is large enough. Requests are independent, so results do not change.
#ifndef FASER_PARALLEL_H_
#define FASER_PARALLEL_H_

#include <cstdint>

#include "pool.h"

namespace faser {

// Logits that one thread handles in about 100 us: a distribution costs about ten times an argmax.
constexpr int64_t kSerialArgmaxEntries = 1 << 20;
constexpr int64_t kSerialProbsEntries = 1 << 16;

template <typename Body>
void for_each_request(faser_pool* pool, int32_t num_requests, int32_t num_rows, int32_t vocab_size, bool all_greedy,
                      Body&& body) {
  const int64_t entries = static_cast<int64_t>(num_rows) * vocab_size;
  if (pool != nullptr && num_requests > 1 && entries > (all_greedy ? kSerialArgmaxEntries : kSerialProbsEntries)) {
    pool->parallel_for(num_requests, body);
    return;
  }
  for (int32_t i = 0; i < num_requests; ++i) body(i);
}

}  // namespace faser

#endif  // FASER_PARALLEL_H_
