// Verdicts of rows that several blocks look at, in stages: estimates decide where their errors cannot change the
// verdict, and what is left is decided from the same numbers as by one block (verdict.cuh).
#ifndef FASER_CUDA_SAMPLING_ACCEPT_PARTS_CUH_
#define FASER_CUDA_SAMPLING_ACCEPT_PARTS_CUH_

#include "sampling/cut.cuh"
#include "sampling/parts.cuh"
#include "sampling/race.cuh"
#include "sampling/verdict.cuh"

namespace faser {

constexpr double kSlack = 1.0001;  // an estimated mass is nearer than that
constexpr double kMassUnit = 0x1p-40;

struct PartsShared {
  union {
    RowShared row;
    CutShared cut;
    RaceShared race;
    DrawShared draw;
  };
};

template <typename T>
struct AcceptParts {
  const AcceptRows<T>& a;
  Workspace workspace;
  PartsShared* shared;

  // The first stage, of all rows: the best entry, and what one look at a row can decide.
  __device__ void scan(int32_t row, int32_t part) {
    if (part >= workspace.num_parts || row >= a.num_rows) return;
    prefetch_part(a.entries(row, false), part);
    int32_t slot, position;
    bool has_draft;
    if (!a.find(row, &slot, &position, &has_draft)) return;
    RowStatus status = slot < 0 ? kRowRefused : kRowOk;
    if (status == kRowOk) {
      const int32_t begin = part * kPartEntries;
      status = a.edit(a.sampling[slot], row, position, begin, part_end(begin, a.vocab_size));
    }
    if (status == kRowRefused) {
      if (part == 0) a.write(row, {kRowRefused, -1, 0});
      return;
    }
    const Sampling& s = a.sampling[slot];
    RowWork& work = workspace.row(row);
    PartRecord* parts = workspace.parts(row);
    const bool is_edited = has_edits(s, position);
    const Row<T> logits = a.entries(row, is_edited);
    PartEntries entries(logits, part);
    bool is_bad = status == kRowNan;
#pragma unroll
    for (int i = 0; i < kThreadEntries; ++i) is_bad |= !is_finite_logit(entries.value[i]);
    uint64_t best = block_reduce(is_bad ? kBadRank : best_of(entries), Max());
    if (threadIdx.x == 0) parts[part].rank[0] = best;
    const float inv_temperature = inverse_temperature(s.temperature);
    const bool is_plain = !has_cut(s, a.vocab_size) && !(s.min_p > 0.0f);
    const bool is_estimated =
        is_plain && inv_temperature < kMaxInverseTemperature && is_coupled(s, position, has_draft);
    if (best != kBadRank && s.mode != kGreedy) {
      const float top = value_of_rank(best);
      if (is_estimated) {
        const float per_logit = inv_temperature * kLog2E;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kThreadEntries; ++i) sum += exp2_approx((entries.value[i] - top) * per_logit);
        // Of a part that has nothing but -inf, sums are not numbers, and the last block leaves them out.
        const uint64_t units = block_reduce(static_cast<uint64_t>(sum * static_cast<float>(1 / kMassUnit)), Sum());
        if (threadIdx.x == 0) parts[part].mass = units;
      } else if (has_cut(s, a.vocab_size)) {
        clear_histogram(&work, part, workspace.num_parts);
      } else if (is_plain && s.mode == kSeeded) {
        find_racers<false>(entries, top, inv_temperature, s.key, static_cast<uint64_t>(position), &parts[part],
                           &shared->race);
      }
    }
    if (!is_last_block(&work.arrived, workspace.num_parts)) return;

    best = 0;
    for (int32_t i = threadIdx.x; i < workspace.num_parts; i += kThreads) best = Max()(best, parts[i].rank[0]);
    best = block_reduce(best, Max());
    Verdict verdict = {kRowNan, -1, 0};
    if (best == kBadRank || judge_best(s, a.vocab_size, position, has_draft, best, &verdict)) {
      a.write(row, verdict);
      return;
    }
    RowProbs probs = {value_of_rank(best), inv_temperature, s.min_p, 0, 1.0f};
    if (is_plain && s.mode == kSeeded) {
      double lead;
      int32_t token = race_winner(s, logits, position, probs, parts, &lead);
      if (!(lead > kSureLead)) {  // once in some million rows
        probs.scale = scale_of(logits, probs);
        token = race_winner(s, logits, position, probs, parts, &lead);
      }
      a.write(row, verdict_of(token, has_draft ? s.tokens[position] : -1));
      return;
    }
    if (is_estimated && surely_accepts(s, logits, position, probs, parts)) {
      a.write(row, {kRowOk, s.tokens[position], 1});
      return;
    }
    if (threadIdx.x != 0) return;
    work.slot = slot;
    work.position = position;
    work.has_draft = has_draft;
    work.is_edited = is_edited;
    work.probs = probs;
    workspace.list(kWeigh, row);
  }

  __device__ void weigh(int32_t row, int32_t part) {
    const RowWork& work = workspace.row(row);
    const Row<T> logits = a.entries(row, work.is_edited);
    const PartEntries entries(logits, part);
    const Sampling& s = a.sampling[work.slot];
    RowProbs probs = work.probs;
    if (weigh_part(workspace, row, part, s, logits, entries, &probs, &shared->cut)) test(row, s, logits, probs);
  }

  __device__ void rank(int32_t row, int32_t part) {
    const RowWork& work = workspace.row(row);
    const Row<T> logits = a.entries(row, work.is_edited);
    const PartEntries entries(logits, part);
    const Sampling& s = a.sampling[work.slot];
    RowProbs probs = work.probs;
    if (rank_part(workspace, row, s, a.vocab_size, entries, &probs, &shared->cut)) test(row, s, logits, probs);
  }

  // A token, by a row's cut and scale.
  __device__ void draw(int32_t row, int32_t part) {
    RowWork& work = workspace.row(row);
    const Row<T> logits = a.entries(row, work.is_edited);
    PartEntries entries(logits, part);
    const Sampling& s = a.sampling[work.slot];
    PartRecord* parts = workspace.parts(row);
    const RowProbs probs = work.probs;
    const int32_t position = work.position, num_parts = workspace.num_parts;
    const bool has_draft = work.has_draft, coupled = is_coupled(s, position, has_draft);
    const int32_t draft = has_draft ? s.tokens[position] : -1;
    const uint64_t index = static_cast<uint64_t>(position);
    const float* q = coupled ? draft_probs_of(s, position, a.max_draft_len, a.vocab_size) : nullptr;
    const auto p_mass = [&](float x, int32_t v) { return fixed_of(probs.probability(x, v), kProbabilityShift); };
    const auto mass = [&](float x, int32_t v) {
      return coupled ? residual_mass(probs.probability(x, v), q[v]) : p_mass(x, v);
    };
    if (s.mode == kSeeded) {
      drop(probs, &entries);
      find_racers<false>(entries, probs.max, probs.inv_temperature, s.key, index, &parts[part], &shared->race);
    } else {
      const uint64_t sum = part_sum(entries, [&](float x, int32_t v) { return v < a.vocab_size ? mass(x, v) : 0; });
      if (threadIdx.x == 0) parts[part].mass = sum;
    }
    if (!is_last_block(&work.arrived, num_parts)) return;

    if (s.mode == kSeeded) {
      double lead;
      a.write(row, verdict_of(race_winner(s, logits, position, probs, parts, &lead), draft));
      return;
    }
    const uint64_t bits = uniform_bits(s.key, index, coupled ? kRecoverStream : kBonusStream);
    const auto mass_at = [&](int32_t v) { return mass(logits[v], v); };
    int32_t token = draw_among_parts(parts, num_parts, a.vocab_size, bits, mass_at, &shared->draw);
    if (token < 0 && coupled) {  // as in judge()
      token = draw_index(a.vocab_size, bits, [&](int32_t v) { return p_mass(logits[v], v); }, &shared->draw);
    }
    a.write(row, verdict_of(token, coupled ? -1 : draft));
  }

  __device__ void whole(int32_t row) {
    const RowWork& work = workspace.row(row);
    const Sampling& s = a.sampling[work.slot];
    const Row<T> logits = a.entries(row, work.is_edited);
    a.write(row, judge(s, logits, work.position, work.has_draft, a.max_draft_len, &shared->row));
  }

 private:
  __device__ int32_t race_winner(const Sampling& s, const Row<T>& logits, int32_t position, const RowProbs& probs,
                                 const PartRecord* parts, double* lead) const {
    const auto p = [&](int32_t v) { return probs.probability(logits[v], v); };
    const uint64_t index = static_cast<uint64_t>(position);
    return compare_racers(parts, workspace.num_parts, a.vocab_size, s.key, index, p, lead, nullptr);
  }

  // Whether the draft passes its test whatever the exact mass; probs without a scale.
  __device__ bool surely_accepts(const Sampling& s, const Row<T>& logits, int32_t position, const RowProbs& probs,
                                 const PartRecord* parts) const {
    uint64_t units = 0;
    for (int32_t i = threadIdx.x; i < workspace.num_parts; i += kThreads) {
      const float below = value_of_rank(parts[i].rank[0]) - probs.max;
      const float share = exp2_approx(below * (probs.inv_temperature * kLog2E));
      if (share > 0.0f) units += static_cast<uint64_t>(static_cast<double>(parts[i].mass) * share);
    }
    const double mass = static_cast<double>(block_reduce(units, Sum())) * kMassUnit;
    const int32_t draft = s.tokens[position];
    const float q = draft_probs_of(s, position, a.max_draft_len, a.vocab_size)[draft];
    const double u = uniform(s.key, static_cast<uint64_t>(position), kTestStream);
    const float weight = probs.weight(logits[draft], draft);
    return weight > 0.0f && u * static_cast<double>(q) * mass * kSlack < static_cast<double>(weight);
  }

  // By the row's last block, once its probabilities are known: the verdict, or the next stage draws.
  __device__ void test(int32_t row, const Sampling& s, const Row<T>& logits, const RowProbs& probs) {
    RowWork& work = workspace.row(row);
    const int32_t position = work.position;
    const bool has_draft = work.has_draft;
    const int32_t draft = has_draft ? s.tokens[position] : -1;
    if (is_coupled(s, position, has_draft)) {
      const float q = draft_probs_of(s, position, a.max_draft_len, a.vocab_size)[draft];
      const double u = uniform(s.key, static_cast<uint64_t>(position), kTestStream);
      if (u * static_cast<double>(q) < static_cast<double>(probs.probability(logits[draft], draft))) {
        a.write(row, {kRowOk, draft, 1});
        return;
      }
    }
    if (threadIdx.x != 0) return;
    work.probs = probs;
    workspace.list(kDraw, row);
  }
};

}  // namespace faser

#endif  // FASER_CUDA_SAMPLING_ACCEPT_PARTS_CUH_
