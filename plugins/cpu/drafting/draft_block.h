#ifndef FASER_DRAFT_BLOCK_H_
#define FASER_DRAFT_BLOCK_H_

#include <cstdint>

#include "drafting.h"
#include "engine.h"

namespace faser {

// faser_draft for a block drafter: the first num_active requests of `drafting` draft, without pending drafts.
int32_t draft_block(faser_engine* engine, faser_pool* pool, const faser_batch& batch, faser_sampling* sampling,
                    int32_t num_active, const int32_t* num_new_drafts, int32_t max_draft_len,
                    const faser_draft_stop* stop, Drafting& drafting, float* logits, int32_t* out_num_new);

}  // namespace faser

#endif  // FASER_DRAFT_BLOCK_H_
