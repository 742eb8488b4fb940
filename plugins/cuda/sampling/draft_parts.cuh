// Draws draft tokens from rows that several blocks process, in stages, with the same results as one block (draft.cuh).
#ifndef FASER_CUDA_SAMPLING_DRAFT_PARTS_CUH_
#define FASER_CUDA_SAMPLING_DRAFT_PARTS_CUH_

#include "sampling/cut.cuh"
#include "sampling/draft.cuh"
#include "sampling/parts.cuh"
#include "sampling/race.cuh"

namespace faser {

static_assert(kNumBest == kNumCandidates, "a part keeps as many");

struct DraftShared {
  union {
    RowShared row;
    CutShared cut;
    RaceShared race;
    DrawShared draw;
  };
};

struct DraftParts {
  const SampleRows& a;
  Workspace workspace;
  DraftShared* shared;

  // The first stage, for all rows: finds the best entries, and the racers of rows with is_plain_race().
  __device__ void scan(int32_t request, int32_t part) {
    if (part >= workspace.num_parts || request >= a.num_requests || !a.is_step()) return;
    prefetch_part(a.entries(request, false), part);
    uint64_t ranks[kNumBest] = {};
    if (!a.is_drawing(request)) {
      if (part == 0) a.write(request, {-1, 0.0f, -1}, ranks);
      return;
    }
    const Sampling& s = a.sampling[request];
    const bool is_edited = has_edits(s, a.known[request]);
    const int32_t begin = part * kPartEntries;
    bool is_bad = !a.edit(request, begin, part_end(begin, a.vocab_size));
    if (is_edited && a.edited_logits == nullptr) {
      if (part == 0) a.write(request, {-1, 0.0f, -1}, ranks);
      return;
    }
    PartEntries entries(a.entries(request, is_edited), part);
    RowWork& work = workspace.row(request);
    PartRecord* parts = workspace.parts(request);
#pragma unroll
    for (int i = 0; i < kThreadEntries; ++i) is_bad |= !is_finite_logit(entries.value[i]);
    const bool cuts = s.mode != kGreedy && has_cut(s, a.vocab_size);
    if (cuts) clear_histogram(&work, part, workspace.num_parts);
    uint64_t own = is_bad ? kBadRank : best_below(entries, kBadRank);
#pragma unroll 1
    for (int i = 0; i < kNumBest; ++i) {
      const uint64_t best = block_reduce(own, Max());
      if (threadIdx.x == 0) parts[part].rank[i] = best;
      if (i == 0) ranks[0] = best;
      if (best == kBadRank) break;
      if (own == best) own = best_below(entries, best);
    }
    if (ranks[0] != kBadRank && is_plain_race(s)) {
      find_racers<true>(entries, a.vocab_size, value_of_rank(ranks[0]), inverse_temperature(s.temperature), s.key,
                        index(request), &parts[part], &shared->race);
    }
    if (!is_last_block<false>(&work.arrived, workspace.num_parts)) return;

    const int32_t num_ranks = workspace.num_parts * kNumBest;
    uint64_t bound = kBadRank;
#pragma unroll
    for (int i = 0; i < kNumBest; ++i) {
      own = 0;
      for (int32_t k = threadIdx.x; k < num_ranks; k += kThreads) {
        const uint64_t rank = parts[k / kNumBest].rank[k % kNumBest];
        if (i == 0 || rank < bound) own = Max()(own, rank);
      }
      bound = ranks[i] = block_reduce(own, Max());
    }
    const Drawn nothing = {-1, 0.0f, -1};
    if (ranks[0] == kBadRank || value_of_rank(ranks[0]) == -INFINITY ||
        (s.mode == kSampled && a.kept_probs(request) == nullptr)) {
      a.write(request, nothing, ranks);
      return;
    }
    if (s.mode == kGreedy) {
      a.write(request, {id_of_rank(ranks[0]), margin_of(ranks), -1}, ranks);
      return;
    }
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int i = 0; i < kNumBest; ++i) work.best[i] = ranks[i];
    work.is_edited = is_edited;
    work.probs = {value_of_rank(ranks[0]), inverse_temperature(s.temperature), s.floor(), 0, 1.0f};
    workspace.list(kWeigh, request);
  }

  __device__ void weigh(int32_t request, int32_t part) {
    const RowWork& work = workspace.row(request);
    const Row<float> logits = a.entries(request, work.is_edited);
    const PartEntries entries(logits, part);
    const Sampling& s = a.sampling[request];
    RowProbs probs = work.probs;
    if (!weigh_part(workspace, request, part, s, logits, entries, &probs, &shared->cut)) return;
    if (s.mode == kSeeded && is_plain_race(s)) {
      end_draft_race(request, s, logits, probs);
    } else {
      draw_next(request, probs);
    }
  }

  __device__ void rank(int32_t request, int32_t part) {
    const RowWork& work = workspace.row(request);
    const PartEntries entries(a.entries(request, work.is_edited), part);
    const Sampling& s = a.sampling[request];
    RowProbs probs = work.probs;
    if (rank_part(workspace, request, s, a.vocab_size, entries, &probs, &shared->cut)) draw_next(request, probs);
  }

  // Draws a token from a row whose cut and scale are known.
  __device__ void draw(int32_t request, int32_t part) {
    RowWork& work = workspace.row(request);
    PartRecord* parts = workspace.parts(request);
    const Row<float> logits = a.entries(request, work.is_edited);
    PartEntries entries(logits, part);
    const Sampling& s = a.sampling[request];
    const RowProbs probs = work.probs;
    if (s.mode == kSeeded) {
      drop(probs, &entries);
      find_racers<true>(entries, a.vocab_size, probs.max, probs.inv_temperature, s.key, index(request), &parts[part],
                        &shared->race);
    } else {
      float* kept = a.kept_probs(request);
      const uint64_t sum = part_sum(entries, [&](float x, int32_t v) -> uint64_t {
        if (v >= a.vocab_size) return 0;
        const float p = probs.probability(x, v);
        kept[v] = p;
        return fixed_of(p, kProbabilityShift);
      });
      if (threadIdx.x == 0) parts[part].mass = sum;
    }
    if (!is_last_block<false>(&work.arrived, workspace.num_parts)) return;
    if (s.mode == kSeeded) {
      end_draft_race(request, s, logits, probs);
      return;
    }
    const uint64_t counter = s.draft_counter + static_cast<uint64_t>(*a.step);
    const auto mass = [&](int32_t v) { return fixed_of(probs.probability(logits[v], v), kProbabilityShift); };
    const int32_t token = draw_among_parts(parts, workspace.num_parts, a.vocab_size,
                                           uniform_bits(s.key, counter, kDraftStream), mass, &shared->draw);
    a.write(request, {token, margin_of(work.best), -1}, work.best);
  }

  __device__ void whole(int32_t request) {
    uint64_t ranks[kNumBest] = {};
    const Row<float> logits = a.entries(request, workspace.row(request).is_edited);
    const Drawn drawn = draw_row(a.sampling[request], logits, a.known[request], *a.step, a.kept_probs(request),
                                 a.runners_up != nullptr, ranks, &shared->row);
    a.write(request, drawn, ranks);
  }

 private:
  __device__ uint64_t index(int32_t request) const { return static_cast<uint64_t>(a.known[request]); }

  // Returns true for a seeded request without filters, whose racers the first stage can find.
  __device__ bool is_plain_race(const Sampling& s) const {
    return s.mode == kSeeded && !has_cut(s, a.vocab_size) && !s.has_floor();
  }

  __device__ void draw_next(int32_t request, const RowProbs& probs) const {
    if (threadIdx.x != 0) return;
    workspace.row(request).probs = probs;
    workspace.list(kDraw, request);
  }

  __device__ void end_draft_race(int32_t request, const Sampling& s, const Row<float>& logits, const RowProbs& probs) {
    double lead = 0.0;
    int32_t runner_up = -1;
    const auto p = [&](int32_t v) { return probs.probability(logits[v], v); };
    const int32_t token = compare_racers(workspace.parts(request), workspace.num_parts, a.vocab_size, s.key,
                                         index(request), p, &lead, a.runners_up != nullptr ? &runner_up : nullptr);
    a.write(request, seeded_draw(s, token, lead, runner_up), workspace.row(request).best);
  }
};

}  // namespace faser

#endif  // FASER_CUDA_SAMPLING_DRAFT_PARTS_CUH_
