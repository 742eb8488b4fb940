// Lookups in the ragged arrays of a batch. Results are within bounds for any data.
#ifndef FASER_CUDA_RAGGED_CUH_
#define FASER_CUDA_RAGGED_CUH_

#include <cstdint>

#include "common.cuh"

namespace faser {

// Returns the request that has this row by cu_rows [num_requests + 1]; -1 if none.
__host__ __device__ inline int32_t request_of_row(const int32_t* cu_rows, int32_t num_requests, int32_t row) {
  int32_t low = 0, high = num_requests;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (cu_rows[middle + 1] <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < num_requests && cu_rows[low] <= row ? low : -1;
}

// Returns how many of rows [n], ascending and then -1 for dummies, are below `bound`: in [0, n].
__host__ __device__ inline int32_t num_rows_below(const int32_t* rows, int32_t n, int32_t bound) {
  int32_t low = 0, high = n;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    // As unsigned numbers, dummies come after every row.
    if (static_cast<uint32_t>(rows[middle]) < static_cast<uint32_t>(bound)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace faser

#endif  // FASER_CUDA_RAGGED_CUH_
