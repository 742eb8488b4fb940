// Verdicts of rows that several blocks process, in stages. Estimates decide where their errors cannot change the
// verdict; the rest is decided from the same numbers as in one block (verdict.cuh).
#ifndef FASER_CUDA_SAMPLING_ACCEPT_PARTS_CUH_
#define FASER_CUDA_SAMPLING_ACCEPT_PARTS_CUH_

#include "sampling/cut.cuh"
#include "sampling/parts.cuh"
#include "sampling/race.cuh"
#include "sampling/verdict.cuh"

namespace faser {

constexpr double kSlack = 1.0001;  // an estimated mass is within this factor of the exact one
constexpr double kMassUnit = 0x1p-40;

// The request of a row, and how its verdict is found.
struct RowAsked {
  uint64_t key;
  int32_t slot, position, mode;  // slot -1: the row is refused
  float inv_temperature;
  bool is_any, has_draft, is_edited;
  bool cuts;          // top_k or top_p applies
  bool is_plain;      // without filters
  bool is_estimated;  // an estimate of the mass can decide
};

struct PartsShared {
  RowAsked asked;
  int32_t best_id;
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

  // The first stage, for all rows: finds the best entry, and decides the verdicts that take one pass over a row.
  __device__ void scan(int32_t row, int32_t part) {
    if (part >= workspace.num_parts || row >= a.num_rows) return;
    prefetch_part(a.entries(row, false), part);
    if (threadIdx.x == 0) {
      shared->asked = ask(row);
      shared->best_id = kMaxPositions;
    }
    __syncthreads();
    const RowAsked asked = shared->asked;
    if (!asked.is_any) return;
    RowStatus status = asked.slot < 0 ? kRowRefused : kRowOk;
    if (asked.is_edited) {
      const int32_t begin = part * kPartEntries;
      status = a.edit(a.sampling[asked.slot], row, asked.position, begin, part_end(begin, a.vocab_size));
    }
    if (status == kRowRefused) {
      if (part == 0) a.write(row, {kRowRefused, -1, 0});
      return;
    }
    RowWork& work = workspace.row(row);
    PartRecord* parts = workspace.parts(row);
    if (asked.cuts) clear_histogram(&work, part, workspace.num_parts);
    const Row<T> logits = a.entries(row, asked.is_edited);
    PartEntries entries(logits, part);
    const float own = status == kRowNan ? INFINITY : largest_of(entries), top = block_max(own);
    const bool is_bad = top == INFINITY;
    if (own == top && !is_bad) atomicMin(&shared->best_id, id_of(entries, top));
    if (!is_bad && asked.is_estimated) {
      const float per_logit = asked.inv_temperature * kLog2E;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kThreadEntries; ++i) sum += exp2_approx((entries.value[i] - top) * per_logit);
      // The sum of a part that has only -inf is NaN, and the last block skips such a part.
      const uint64_t units = block_reduce(static_cast<uint64_t>(sum * static_cast<float>(1 / kMassUnit)), Sum());
      if (threadIdx.x == 0) parts[part].mass = units;
    } else if (!is_bad && asked.is_plain && asked.mode == kSeeded) {
      find_racers<false>(entries, a.vocab_size, top, asked.inv_temperature, asked.key,
                         static_cast<uint64_t>(asked.position), &parts[part], &shared->race);
    } else {
      __syncthreads();
    }
    if (threadIdx.x == 0) parts[part].rank[0] = is_bad ? kBadRank : rank_of(top, shared->best_id);
    if (!is_last_block<false>(&work.arrived, workspace.num_parts)) return;

    const Sampling& s = a.sampling[asked.slot];
    const int32_t position = asked.position;
    const bool has_draft = asked.has_draft;
    uint64_t best = 0;
    for (int32_t i = threadIdx.x; i < workspace.num_parts; i += kThreads) best = Max()(best, parts[i].rank[0]);
    best = block_reduce(best, Max());
    Verdict verdict = {kRowNan, -1, 0};
    if (best == kBadRank || judge_best(s, a.vocab_size, position, has_draft, best, &verdict)) {
      a.write(row, verdict);
      return;
    }
    RowProbs probs = {value_of_rank(best), asked.inv_temperature, s.floor(), 0, 1.0f};
    if (asked.is_plain && s.mode == kSeeded) {
      double lead;
      int32_t token = race_winner(s, logits, position, probs, parts, &lead);
      if (!(lead > kSureLead)) {  // once in millions of rows
        probs.scale = scale_of(logits, probs);
        token = race_winner(s, logits, position, probs, parts, &lead);
      }
      a.write(row, verdict_of(token, has_draft ? s.tokens[position] : -1));
      return;
    }
    if (asked.is_estimated && surely_accepts(s, logits, position, probs, parts)) {
      a.write(row, {kRowOk, s.tokens[position], 1});
      return;
    }
    if (threadIdx.x != 0) return;
    work.slot = asked.slot;
    work.position = position;
    work.has_draft = has_draft;
    work.is_edited = asked.is_edited;
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

  // Draws a token from a row whose cut and scale are known.
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
      find_racers<false>(entries, a.vocab_size, probs.max, probs.inv_temperature, s.key, index, &parts[part],
                         &shared->race);
    } else {
      const uint64_t sum = part_sum(entries, [&](float x, int32_t v) { return v < a.vocab_size ? mass(x, v) : 0; });
      if (threadIdx.x == 0) parts[part].mass = sum;
    }
    if (!is_last_block<false>(&work.arrived, num_parts)) return;

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
  __device__ RowAsked ask(int32_t row) const {
    RowAsked asked = {};
    asked.is_any = a.find(row, &asked.slot, &asked.position, &asked.has_draft);
    if (!asked.is_any || asked.slot < 0) return asked;
    const Sampling& s = a.sampling[asked.slot];
    asked.is_edited = has_edits(s, asked.position);
    if (asked.is_edited && a.edited_logits == nullptr) asked = {0, -1, 0, 0, 0.0f, true};
    asked.key = s.key;
    asked.mode = s.mode;
    asked.inv_temperature = inverse_temperature(s.temperature);
    asked.cuts = s.mode != kGreedy && has_cut(s, a.vocab_size);
    asked.is_plain = !asked.cuts && !s.has_floor();
    asked.is_estimated = asked.is_plain && asked.inv_temperature < kMaxInverseTemperature &&
                         is_coupled(s, asked.position, asked.has_draft);
    return asked;
  }

  __device__ int32_t race_winner(const Sampling& s, const Row<T>& logits, int32_t position, const RowProbs& probs,
                                 const PartRecord* parts, double* lead) const {
    const auto p = [&](int32_t v) { return probs.probability(logits[v], v); };
    const uint64_t index = static_cast<uint64_t>(position);
    return compare_racers(parts, workspace.num_parts, a.vocab_size, s.key, index, p, lead, nullptr);
  }

  // Returns true if the draft passes its test for every exact mass that the estimate allows. probs.scale is not read.
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

  // The row's last block, once the probabilities are known, writes the verdict or lists the row for kDraw.
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
