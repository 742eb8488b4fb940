// C ABI of the embedded CPU engine and the host sampling ops: pointers and sizes only, no Python and no files.
//
// A row is one token position of one request in one forward pass. Its result depends bit for bit only on its own
// request's tokens, not on the batch, the number of threads or the split into segments.
// Functions that can fail return 0 or a negative faser_status. Ids, positions and blocks index memory, so they are
// always checked.
#ifndef FASER_CPU_H_
#define FASER_CPU_H_

#include <stdint.h>

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

#define FASER_ABI_VERSION 25
#define FASER_PANEL 64          // outputs per packed weight panel
#define FASER_NUM_CANDIDATES 8  // best tokens of the draft model kept per drafted token

typedef enum {
  FASER_OK = 0,
  FASER_BAD_ARGUMENT = -1,
  FASER_OUT_OF_MEMORY = -2,
  FASER_BAD_TOKEN = -3,     // a token id outside [0, vocab_size)
  FASER_BAD_POSITION = -4,  // a position outside [0, max_seq_len)
  FASER_BAD_BLOCK = -5,     // a block id outside [0, num_blocks)
} faser_status;

int32_t faser_abi_version(void);
// The instruction set in use: "amxbf16", "avx512bf16", "avx2" or "portable"; FASER_CPU_ISA=<name> can lower it.
const char* faser_isa(void);

// Thread pool: a partition of the CPU. The calling thread is worker 0.
// cores: [num_threads] ids to pin workers 1.. to, or NULL for no pinning. Idle workers spin for spin_us, then sleep.
typedef struct faser_pool faser_pool;
faser_pool* faser_pool_create(const int32_t* cores, int32_t num_threads, int32_t spin_us);
void faser_pool_destroy(faser_pool* pool);

// Model: pointers into memory that outlives the engine (the memory-mapped engine file).
// Packed matrix [out, in]: ceil(out / 64) panels, each [in_padded / 2][64] uint32; element [i][j] holds the bf16
// weights of output 64 * panel + j for inputs 2i (low half) and 2i + 1 (high half). in_padded = in rounded up to 32;
// padding is zero. Quantized (weight_bits 8 or 4): panels of [in_padded / n][64] uint32, n = 32 / weight_bits; a word
// has the integers of one output for n neighboring inputs, in two's complement, the first input in the lowest bits.
// Scales [panel][in / group_size, or 1][64] fp32: weight = integer * scale; padded outputs have scale 0. All pointers
// are 64-byte aligned. Norm weights and biases are fp32.
typedef struct {
  const float* input_norm;  // [hidden]
  const uint32_t* qkv;      // packed [(num_heads + 2 * num_kv_heads) * head_dim, hidden]: all q heads, k heads, v heads
  const float* qkv_bias;    // [(num_heads + 2 * num_kv_heads) * head_dim] or NULL
  const float* q_norm;      // [head_dim] or NULL: RMSNorm of each q head before rope (Qwen3); see norms_all_heads
  const float* k_norm;      // [head_dim] or NULL
  const uint32_t* o;        // packed [hidden, num_heads * head_dim]
  const float* o_bias;      // [hidden] or NULL
  const float* post_norm;   // [hidden]
  const uint32_t*
      gate_up;  // packed [2 * padded(intermediate), hidden]: gate rows, then up rows; each part padded to 64
  const float* gate_up_bias;                                          // [2 * padded(intermediate)] or NULL
  const uint32_t* down;                                               // packed [hidden, intermediate]
  const float* down_bias;                                             // [hidden] or NULL
  const float *qkv_scales, *o_scales, *gate_up_scales, *down_scales;  // NULL unless quantized
  // For a mixture's layers (faser_experts): gate_up, down, their scales and biases then hold num_experts matrices of
  // one expert each, one after the other, all padded to whole panels. router and shared_gate are always bf16.
  const uint32_t* router;                                   // packed [num_experts, hidden]
  const float* router_bias;                                 // [num_experts] or NULL
  const uint32_t *shared_gate_up, *shared_down;             // of an expert of shared_size
  const uint32_t* shared_gate;                              // packed [1, hidden]
  const float *shared_gate_up_scales, *shared_down_scales;  // NULL unless quantized
  const float* sinks;  // [num_heads] an additional logit in each head's softmax, whose share is dropped, or NULL
} faser_layer;

// A mixture of experts: a row goes through the top_k experts with the highest scores (on ties, the lowest indices) and
// adds their weighted outputs in ascending order of index.
typedef enum {
  FASER_SOFTMAX = 0,        // scores and weights are a softmax over all experts
  FASER_TOP_K_SOFTMAX = 1,  // scores are the router's logits, weights a softmax over the chosen experts
} faser_scoring;

typedef enum {
  FASER_SILU = 0,     // silu(gate) * up
  FASER_CLAMPED = 1,  // (up + 1) * gate * sigmoid(1.702 gate), gate at most 7 and up within -7 and 7
} faser_activation;

typedef struct {
  int32_t num_experts, top_k;
  int32_t scoring;      // a faser_scoring
  int32_t norm_topk;    // 1: a row's weights are divided by their sum; for FASER_SOFTMAX
  int32_t activation;   // a faser_activation
  int32_t shared_size;  // width of an expert that all rows go through, times sigmoid(shared_gate x); 0: none
  int32_t is_mxfp4;     // 1: gate_up and down are e2m1 (4 bits) in groups of 32, in a bf16 model
} faser_experts;

// The parts of an EAGLE-3 head (arXiv 2503.01840) or an MTP layer that a decoder lacks. The row of the token at
// position t takes the target's hidden rows of position t - 1 or, if there are none yet, the head's own output of
// position t - 1. In an EAGLE-3 head, the normed embedding followed by the normed hidden row is the input of the first
// layer's qkv, which is packed [.., 2 * hidden]. In an MTP layer it is the input of input_proj, after which the layer
// is a decoder's. Further layers are a decoder's. No row attends to position 0, which has no hidden row before it.
typedef struct {
  const uint32_t* fc;            // packed [hidden, num_features]; NULL: an MTP layer
  const float* fc_bias;          // [hidden] or NULL
  const float* hidden_norm;      // [hidden]
  const int32_t* target_ids;     // [draft_vocab_size] token ids of lm_head's outputs, or NULL: the same
  int32_t num_features;          // captured layers times the target's hidden_size
  int32_t draft_vocab_size;      // lm_head is packed [draft_vocab_size, hidden]; other tokens have logit -inf
  int32_t norm_before_residual;  // 1: the residual is the normed hidden row
  const uint32_t* input_proj;    // of an MTP layer: packed [hidden, 2 * hidden]
  const float* token_norm;       // of an MTP layer: [hidden], of the embedding
  int32_t reads_normed;          // 1: the target's last hidden row is used after its final norm
  int32_t feeds_normed;  // 1: the output that the next position takes is after the final norm, as in an MTP layer
  int32_t num_fc_norms;  // norms of fc's input: 0: none; 1: of the whole row; n: of n parts of equal size
  const float* fc_norm;  // [num_features], or NULL
} faser_head;

// Medusa heads (arXiv 2401.10774). Head i reads the target's last hidden row of a position, after its final norm, and
// predicts the token i + 2 positions on: num_layers residual blocks, x + silu(W x + b), and an LM head.
typedef struct {
  const uint32_t* residual;    // packed [hidden, hidden], num_heads * num_layers of them
  const float* residual_bias;  // [num_heads * num_layers, padded(hidden)]
  int32_t num_heads, num_layers;
} faser_medusa;

// Causal convolutions over a block's rows before (0) and after (1) a sublayer: out[t] = sum over taps of (base +
// delta[t]) * in[t - tap], for rows in the block. Deltas, one per group of channels, come from the normed input.
typedef struct {
  const float* base;      // [2, taps, hidden]
  const uint32_t* delta;  // packed [2 * taps * hidden / group, hidden]
} faser_conv;

// The parts of a block drafter (DFlash, DFlash2, DSpark) that a decoder lacks. A context row of position p is
// hidden_norm(fc x), with x the target's hidden rows of that position. Only its keys and values are kept, by each
// layer's part of qkv without input_norm. A block is block_size rows, of the last committed token followed by
// mask_token_id, at consecutive positions from that token's on. They attend to the context before the block and to each
// other. Row first_slot + k yields the logits of draft k: logit_scale times the LM head's, then, unless logit_softcap
// is 0, logit_softcap * tanh(x / logit_softcap). With markov_rank, markov_out times the row of markov_in of the token
// before the draft is added. With selector_rank, only the selector_top_k best tokens can be drafted, and the logit of
// token b gets the sum of predecessors[a] * successors[b] * (selector_proj times the normed row), with a the token
// before.
typedef struct {
  const uint32_t* fc;                             // packed [hidden, num_features]
  const float* hidden_norm;                       // [hidden]
  const uint16_t* markov_in;                      // bf16 [vocab_size, markov_rank] row-major, or NULL
  const uint32_t* markov_out;                     // packed [vocab_size, markov_rank], or NULL
  const uint16_t *predecessors, *successors;      // bf16 [vocab_size, selector_rank] row-major, or NULL
  const uint32_t* selector_proj;                  // packed [selector_rank, hidden], or NULL
  const faser_conv *attention_convs, *mlp_convs;  // [num_layers], or NULL
  const int32_t* causal;                          // [num_layers] 1: no row of a block attends to rows after it
  int32_t num_features, block_size, first_slot, mask_token_id, markov_rank;
  int32_t selector_rank, selector_top_k, conv_taps, conv_group_size;  // 0: none
  float logit_softcap, logit_scale, embedding_scale;
} faser_block;

typedef struct {
  int32_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, vocab_size, max_seq_len;
  float rms_norm_eps;
  float rope_attention_factor;  // scales cos and sin (YaRN); 1 otherwise
  const float* rope_inv_freq;   // [head_dim / 2], scaling already applied
  const uint16_t* embedding;    // bf16 [vocab_size, hidden_size] row-major, or NULL: rows are read from lm_head (tied)
  const float* final_norm;      // [hidden]
  const uint32_t* lm_head;      // packed [vocab_size, hidden]
  const faser_layer* layers;    // [num_layers]
  const int32_t* windows;  // [num_layers] tokens that a row attends to, itself included; 0: all; NULL: all everywhere
  const faser_head* head;  // NULL: a decoder; else with an embedding, and for an MTP layer one layer
  const faser_medusa* medusa;    // NULL; else num_layers is 1, the layer is empty, and lm_head has num_heads matrices
  const faser_block* block;      // NULL; else a block drafter, with an embedding unless lm_head is tied
  const faser_experts* experts;  // NULL: all layers are dense; else a decoder, whose intermediate_size is an expert's
  const float* lm_head_scales;   // NULL: the LM head is bf16
  int32_t weight_bits;           // of the layers' matrices: 16 (bf16), 8 or 4
  int32_t group_size;  // inputs that share a scale: 32 or 128, dividing every matrix's inputs; 0: all (8 bits)
  // Of the inputs of quantized matrices: 16 (bf16), or 8: integers with a scale for each row and group of group_size
  // inputs (128 if that is 0), the group's largest magnitude / 127. Heads have 16.
  int32_t activation_bits;
  // For a draft model with fewer tokens than its target: lm_head is packed [num_outputs, hidden], and the other tokens
  // have logit -inf. Such a model has an embedding.
  int32_t num_outputs;
  const int32_t* output_ids;  // [num_outputs] token ids of lm_head's outputs, ascending, or NULL: the same
  // 1: q_norm [num_heads * head_dim] and k_norm [num_kv_heads * head_dim] are each of all heads of a row (OLMoE), and
  // their sizes multiples of 16.
  int32_t norms_all_heads;
} faser_model;

// Engine: KV memory, workspaces and the forward pass.
typedef struct faser_engine faser_engine;
// tokens_per_block: a multiple of 16. The descriptor is copied, but not what it points to.
// status: receives a faser_status when NULL is returned.
// A pass uses one thread or all of the pool's, whichever was measured to be faster; FASER_CPU_TEAM=always uses all
// except for tiny passes. Results are the same.
faser_engine* faser_engine_create(const faser_model* model, faser_pool* pool, int32_t num_blocks,
                                  int32_t tokens_per_block, int32_t max_num_tokens, int32_t max_num_requests,
                                  int32_t* status);
void faser_engine_destroy(faser_engine* engine);
int64_t faser_engine_memory_bytes(const faser_engine* engine);  // KV pool and workspaces
// Leading dimension (floats) of a logits row: vocab_size rounded up to 64.
int32_t faser_engine_logits_stride(const faser_engine* engine);

// Number of experts per layer that the last pass read: the mean over the layers that ran, with its segments taken
// together. 0 if there are no experts or no rows.
double faser_engine_distinct_experts(const faser_engine* engine);

// A ragged batch: rows of many requests, each request's rows at consecutive positions.
typedef struct {
  int32_t num_requests;
  int32_t num_rows;
  int32_t max_blocks_per_seq;
  const int32_t* slots;        // [num_requests] rows of block_table
  const int32_t* cu_rows;      // [num_requests + 1] cumulative rows
  const int32_t* token_ids;    // [num_rows]
  const int32_t* positions;    // [num_rows]
  const int32_t* block_table;  // [max_num_slots, max_blocks_per_seq] block ids
  // The last num_branches requests are branches of one row each: a token in place of a row of request branch_parents[k]
  // [num_branches], which comes before them. A branch has its parent's blocks up to the one of its row, for which it
  // has a block of its own. That block already has the KV of tokens before this pass (faser_engine_copy_kv), and
  // receives its parent's rows before its position.
  const int32_t* branch_parents;
  int32_t num_branches;
} faser_batch;

// Runs layers [first_layer, last_layer). first_layer == 0 embeds the tokens; otherwise it continues with the hidden
// rows of the previous call on this engine (rows dropped in between are removed with faser_engine_compact_rows). With
// last_layer == num_layers: final norm and LM head of the rows listed in logit_rows (indices into the batch's rows,
// ascending) into logits [num_logit_rows, logits_stride].
int32_t faser_engine_forward(faser_engine* engine, const faser_batch* batch, int32_t first_layer, int32_t last_layer,
                             const int32_t* logit_rows, int32_t num_logit_rows, float* logits);
// Gives a head its target, before the first pass of either. From then on the target's passes keep its hidden rows, by
// block and offset like KV, as they enter these layers (ascending; num_layers means leaving the last one), rounded to
// bf16. For Medusa heads, layers is num_layers alone, and rows are kept after the final norm. The target outlives the
// head and has as many blocks. A pass of the head comes after the target's pass over the position before each of its
// rows; for a block drafter, over the position of each row. A block drafter's faser_engine_forward runs context rows
// and yields no logits. Another head may replace an earlier one if it reads the same rows.
int32_t faser_engine_attach_head(faser_engine* head, faser_engine* target, const int32_t* layers, int32_t num_layers);
// Keeps the listed hidden rows (ascending) and drops the others; later calls must pass a matching batch.
int32_t faser_engine_compact_rows(faser_engine* engine, const int32_t* rows, int32_t num_rows);
// Between two segments: final norm of the hidden rows listed, times the LM head rows of each row's own candidates, in
// fp32. candidates, scores: [num_rows, num_candidates]; a candidate of -1 scores -inf. Hidden rows are unchanged.
int32_t faser_engine_early_exit(faser_engine* engine, const int32_t* rows, int32_t num_rows, const int32_t* candidates,
                                int32_t num_candidates, float* scores);
// Copies the hidden rows between two segments, for tests: hidden [num_rows, hidden_size]; num_rows as in the last call.
int32_t faser_engine_hidden_rows(const faser_engine* engine, int32_t num_rows, float* hidden);
// Copies the KV of the tokens at offsets first[i] .. end[i] - 1 from block from[i] to block to[i], with the hidden rows
// kept for a head. Up to 15 tokens before and after may be copied too, but not for the head.
int32_t faser_engine_copy_kv(faser_engine* engine, int32_t num_copies, const int32_t* from, const int32_t* to,
                             const int32_t* first, const int32_t* end);
// Switches the engine to another pool from the next call on. Results are the same.
int32_t faser_engine_set_pool(faser_engine* engine, faser_pool* pool);

// Sampling
typedef enum { FASER_GREEDY = 0, FASER_SEEDED = 1, FASER_SAMPLED = 2 } faser_sampling_mode;

// The source of a pending draft. The draft model draws from q. A draft of the suffix automaton is certain, so it has no
// q. Drafts from a prediction are counted with the automaton's.
typedef enum {
  FASER_BY_MODEL = 0,
  FASER_BY_SUFFIX = 1,
  FASER_NUM_SOURCES = 2,
  FASER_BY_PREDICTION = 2,
} faser_draft_source;

// Writes the masks of the guided requests among these slots for the token after their first num_known[i] tokens. Called
// on the drafting thread before it draws.
typedef void (*faser_fill_masks)(int32_t num_requests, const int32_t* slots, const int32_t* num_known);

// Sampling parameters of one request. One entry per slot; Python writes it when the request is admitted.
typedef struct {
  int32_t* tokens;       // committed tokens, then pending drafts; faser_draft appends to the latter
  float* draft_probs;    // FASER_SAMPLED: q of pending drafts, row (position % max_draft_len); else NULL
  float* draft_margins;  // NULL, or by position: how much logit the draft could lose and still be chosen, <= 1e4.
                         // Top-1 minus top-2 of the edited logits; FASER_SEEDED: temperature times the Gumbel-max lead
                         // (draw.h), the same difference including the noise that draft and target share.
                         // FASER_BY_SUFFIX: the log-odds that the draft is accepted
  int32_t* draft_candidates;  // NULL, or by position: [FASER_NUM_CANDIDATES] best ids of those logits, best first, -1
                              // where fewer are possible; a draft that is not among them comes last
  int8_t* draft_sources;      // NULL (all are the draft model's), or by position: faser_draft_source
  const int32_t* end_ids;     // banned while fewer than min_tokens tokens were generated
  const int32_t* bias_ids;    // logit bias
  const float* bias_values;
  const int32_t* bad_words;     // all bad words' ids, concatenated
  const int32_t* cu_bad_words;  // [num_bad_words + 1]
  uint64_t key;                 // FASER_SEEDED: the user's seed; FASER_SAMPLED: random, unique per request
  uint64_t draft_counter;       // FASER_SAMPLED: advanced by each drafted token, so that no random number is reused
  int64_t num_tested[FASER_NUM_SOURCES], num_passed[FASER_NUM_SOURCES];  // drafts of the slot, verified and accepted,
                                                                         // since the start; counted by faser_accept
  int32_t num_end_ids, num_bias, num_bad_words;
  int32_t prompt_len;
  int32_t min_tokens;
  int32_t mode;              // faser_sampling_mode
  int32_t top_k;             // 0: off
  float temperature;         // > 0 unless greedy
  float top_p;               // 1: off
  float min_p;               // 0: off
  float repetition_penalty;  // 1: off; over prompt and output, logits > 0 divided, <= 0 multiplied
  float presence_penalty;    // 0: off; over prompt and output, as in TensorRT-LLM
  float frequency_penalty;   // 0: off
  int32_t num_mask_rows;     // of masks
  const uint32_t* masks;  // NULL, or by position % num_mask_rows: [ceil(vocab_size / 32)] words; token v is allowed at
                          // that position only if bit v % 32 of word v / 32 is set
  faser_fill_masks fill_masks;  // NULL, or writes masks; faser_draft and faser_sample_draft call it, faser_accept
                                // expects the masks of its rows
  int32_t* draft_runners_up;  // NULL, or by position: the draft model's second choice, -1 for none (FASER_SAMPLED: the
                              // best of the edited logits except the draft)
} faser_sampling;

// The distribution of the next token of one request given its first num_tokens tokens: logits edited in this order:
// penalties, bias, bad words and min_tokens bans, the mask, temperature, top_k, top_p, min_p, softmax. probs:
// [vocab_size]. Returns FASER_ROW_OK, or FASER_ROW_NAN / FASER_ROW_EMPTY (probs undefined).
typedef enum { FASER_ROW_OK = 0, FASER_ROW_NAN = 1, FASER_ROW_EMPTY = 2 } faser_row_status;
int32_t faser_next_token_probs(const faser_sampling* sampling, const float* logits, int32_t vocab_size,
                               int32_t num_tokens, float* probs);

// Rejection sampling over a batch. Request i has logits rows cu_logit_rows[i] .. cu_logit_rows[i + 1] - 1 for its last
// committed token and its drafts d_1 .. d_L, or none, num_tokens[i] committed tokens, and num_drafts[i] >= L pending
// drafts after them in sampling[slots[i]].tokens. Outputs per request: committed tokens in order (accepted drafts,
// then at most one recovered or bonus token), their number, the number of accepted drafts, an outcome and a row status.
typedef enum {
  FASER_STILL_PENDING = 0,  // all drafts with a row were accepted: later ones stay pending, nothing was drawn
  FASER_RECOVERED = 1,      // a draft was rejected and one recovered token drawn: pending drafts are dropped
  FASER_BONUS = 2,          // every pending draft was accepted and one bonus token drawn
  FASER_FAILED = 3,         // see row_status; the tokens before the failing row are committed
} faser_outcome;
int32_t faser_accept(faser_pool* pool, int32_t num_requests, const int32_t* slots, faser_sampling* sampling,
                     const float* logits, int32_t logits_stride, int32_t vocab_size, const int32_t* cu_logit_rows,
                     const int32_t* num_tokens, const int32_t* num_drafts, int32_t max_draft_len,
                     int32_t* out_tokens,        // [num_requests, max_draft_len + 1]
                     int32_t* out_num_tokens,    // [num_requests]
                     int32_t* out_num_accepted,  // [num_requests]
                     int32_t* out_outcome,       // [num_requests] faser_outcome
                     int32_t* out_row_status);   // [num_requests] faser_row_status

// Draws one draft token per request from logits row i, appends it to sampling[slots[i]].tokens after num_known[i]
// tokens (committed and pending) and keeps its q where the mode needs it. out_tokens[i] is -1 if the row has no usable
// distribution.
int32_t faser_sample_draft(faser_pool* pool, int32_t num_requests, const int32_t* slots, faser_sampling* sampling,
                           const float* logits, int32_t logits_stride, int32_t vocab_size, const int32_t* num_known,
                           int32_t max_draft_len, int32_t* out_tokens);

// Drafts from the request's own text, prompt and output: the most frequent continuation of the longest suffix that
// occurred before, on ties the latest. There is one automaton per slot, for at most max_tokens tokens; when it is full,
// it starts again with the later half. faser_suffix_memory_bytes: current size.
typedef struct faser_suffix faser_suffix;
faser_suffix* faser_suffix_create(int32_t max_batch_size, int32_t max_tokens, int32_t* status);
void faser_suffix_destroy(faser_suffix* suffix);
int64_t faser_suffix_memory_bytes(const faser_suffix* suffix);
// Ends the slot's request and forgets its text.
int32_t faser_suffix_reset(faser_suffix* suffix, int32_t slot);
// Starts the slot's request, whose output is expected to repeat these tokens: they precede its text, and its output is
// assumed to begin as they do. only_prediction: nothing else is proposed.
int32_t faser_suffix_predict(faser_suffix* suffix, int32_t slot, const int32_t* tokens, int32_t num_tokens,
                             int32_t only_prediction);
// Adds what was committed since the last call, then proposes up to num_new_drafts[i] drafts after num_drafts[i] pending
// ones, each with its source, its log-odds of acceptance as margin, and itself as candidate. Stops where nothing
// matches, where a row would hardly be reached, and before position num_model[i] (up to which the draft model would
// draft) if the draft model is more likely to be right.
int32_t faser_suffix_draft(faser_suffix* suffix, int32_t num_requests, const int32_t* slots, faser_sampling* sampling,
                           const int32_t* num_tokens, const int32_t* num_drafts, const int32_t* num_new_drafts,
                           const int32_t* num_model, int32_t* out_num_new);

// Early stopping of drafting. A draft at position j (0: the first pending one) with margin m, of a request with
// sampling mode s, is accepted with probability sigmoid(slope[s][j] * m + intercept[s][j]); survival is the product
// over a request's pending drafts. After each draft, the next one is worth the mean of max(0, survival * probability -
// row_price[j + 1]) over the probabilities prior[s][j + 1] +- spread[s][j + 1]. A request stops when neither pays, and
// all stop when the sum over the continuing requests is below step_price[their number].
typedef struct {
  const float *slope, *intercept, *prior, *spread;  // [modes, stride]
  const float* row_price;                           // [max_draft_len]
  const float* step_price;                          // [num_requests + 1]
  int32_t stride;                                   // >= max_draft_len
} faser_draft_stop;

// Computes the survival of each request's first num_drafts[i] pending drafts after num_tokens[i] committed tokens; 1
// without drafts. Returns FASER_BAD_ARGUMENT for a slot with drafts but without margins.
int32_t faser_pending_survival(const faser_draft_stop* stop, int32_t num_requests, const int32_t* slots,
                               const faser_sampling* sampling, const int32_t* num_tokens, const int32_t* num_drafts,
                               double* out_survival);

// Drafting in one call. The batch's rows bring each request's draft KV up to its last known token: committed or pending
// for a draft model; committed for a head, which then runs the pending drafts itself from its own output; committed for
// a block drafter, which has no pending drafts and drafts at most one block. Then request i drafts num_new_drafts[i] >=
// 0 tokens, appended to sampling[slot].tokens after num_tokens[i] + num_drafts[i], each drawn from the same edited
// distribution as the target's (greedy: argmax; seeded: the shared noise; sampled: q kept in draft_probs). A row with
// NaN logits or an empty distribution ends that request's drafting. stop: NULL, or ends drafting early (needs
// draft_margins of every drafting request). out_num_new: [num_requests] tokens drafted. logits: workspace
// [max_num_requests, logits_stride]; for a block drafter [max_num_tokens, logits_stride].
int32_t faser_draft(faser_engine* engine, faser_pool* pool, const faser_batch* batch, faser_sampling* sampling,
                    const int32_t* num_tokens, const int32_t* num_drafts, const int32_t* num_new_drafts,
                    int32_t max_draft_len, const faser_draft_stop* stop, float* logits, int32_t* out_num_new);

// Costs of slots, which are rows that verify one draft each, and of the draft steps that make the drafts.
typedef struct {
  const double* verify_ms;                       // [num_costs] of a pass, by its number of slots
  const double *draft_first_ms, *draft_step_ms;  // [num_requests + 1] by drafting requests; NULL: drafts exist already
  double fixed_ms;                               // of a step with slots, in addition
  double base_tokens;                            // of a step without slots
  double price;                                  // tokens per ms; 0: maximize the ratio of tokens to ms
  int32_t num_costs;                             // more slots cost as much as the last entry
  int32_t multiple;                              // only multiples of this number of slots are considered; 1: all
} faser_slot_costs;

// Finds the slots that pay. All requests' slots are ranked by survival, and the number of slots is chosen that
// maximizes tokens - price * ms (possibly none) or, if price is 0, tokens / ms (at least one, if there is any).
// survival [num_requests, stride]: chance that all drafts of the request up to this position are accepted; it never
// rises along a request. limits [num_requests]: number of valid positions. out_lengths [num_requests]; out_score: the
// maximum.
int32_t faser_best_slots(const faser_slot_costs* costs, int32_t num_requests, int32_t stride, const double* survival,
                         const int32_t* limits, int32_t* out_lengths, double* out_score);

// The acceptance probability of a draft at position j (0: the first pending one) with margin m and sampling mode s:
// sigmoid(slope[s][j] * min(m, max_margin) + intercept[s][j]).
typedef struct {
  const float *slope, *intercept;  // [modes, stride]
  double max_margin;
  int32_t stride;  // maximum number of pending drafts
} faser_acceptance;

// Chooses how many drafts of each request a pass verifies: faser_best_slots over a batch's pending drafts, with
// survivals estimated from their margins. num_tokens, num_pending [num_requests]: committed tokens, and drafts after
// them.
int32_t faser_verify_lengths(const faser_slot_costs* costs, const faser_acceptance* acceptance, int32_t num_requests,
                             const int32_t* slots, const faser_sampling* sampling, const int32_t* num_tokens,
                             const int32_t* num_pending, int32_t* out_lengths);

// Chooses branches, which are rows for the draft model's runner-up in place of a draft. A candidate is position j of
// request i, if its row j (0 .. num_verified[i]) verifies a pending draft. Its worth is the probability that rejection
// sampling reaches that draft, rejects it and recovers the runner-up, estimated as a share of rejections. Chosen are
// the best max_branches of each request with at least min_worth, in the order of requests and positions, max_num in
// total. trades: each takes the row of its request's last draft if that is less likely to be reached, and num_verified
// falls. out_requests (indices), out_places, out_tokens [max_num]. Returns their number.
int32_t faser_pick_branches(int32_t num_requests, const int32_t* slots, const faser_sampling* sampling,
                            const int32_t* num_tokens, const int32_t* num_pending, int32_t* num_verified,
                            const faser_acceptance* acceptance, int32_t trades, double min_worth, int32_t max_branches,
                            int32_t max_num, int32_t* out_requests, int32_t* out_places, int32_t* out_tokens);

// Computes the log-odds, limited to +-max_log_odds, that the first num_drafts[i] pending drafts of each request are
// accepted: out [sum of num_drafts], request by request.
int32_t faser_log_odds(const faser_acceptance* acceptance, double max_log_odds, int32_t num_requests,
                       const int32_t* slots, const faser_sampling* sampling, const int32_t* num_tokens,
                       const int32_t* num_drafts, float* out);

// Finds what a segment boundary compares for those drafts: out_candidates [sum of num_drafts, FASER_NUM_CANDIDATES],
// and out_places [sum of num_drafts], the draft's place among them, 0 if it is not there.
int32_t faser_exit_drafts(int32_t num_requests, const int32_t* slots, const faser_sampling* sampling,
                          const int32_t* num_tokens, const int32_t* num_drafts, int32_t* out_candidates,
                          int32_t* out_places);

// Sums over verified drafts, for a fit of faser_acceptance: p is the estimate from before, y 1 if the draft was
// accepted and 0 if not, m the margin, w = p (1 - p).
typedef struct {
  double* cells;  // [modes, stride, 7] sums of 1, y, (y - p) m, y - p, w m m, w m, w
  double* bins;   // [3, num_bins] by p: sums of 1, p, y
  int32_t num_bins;
} faser_test_sums;

// Adds the outcome of rejection sampling. num_tokens: committed before it; num_accepted, outcome: from faser_accept.
int32_t faser_add_tests(const faser_test_sums* sums, const faser_acceptance* acceptance, int32_t num_requests,
                        const int32_t* slots, const faser_sampling* sampling, const int32_t* num_tokens,
                        const int32_t* num_accepted, const int32_t* outcome);

// Fills the rows of a batch: for request i the tokens at positions first[i] .. end[i] - 1 of sampling[slots[i]].tokens,
// the last num_logit_rows[i] of which produce logits. cu_rows [num_requests + 1]; token_ids, positions, logit_rows
// [max_num_rows]; out_num_logit_rows: one number. Returns the number of rows; FASER_BAD_ARGUMENT if they do not fit, a
// request has none, or a slot has no tokens.
int32_t faser_fill_rows(int32_t num_requests, const int32_t* slots, const faser_sampling* sampling,
                        const int32_t* first, const int32_t* end, const int32_t* num_logit_rows, int32_t max_num_rows,
                        int32_t* cu_rows, int32_t* token_ids, int32_t* positions, int32_t* logit_rows,
                        int32_t* out_num_logit_rows);

// Counts of a request: committed tokens, pending drafts, tokens with the target's and with the draft model's KV, the
// drafters that may draft for it (bits by faser_draft_source), the maximum of tokens and of pending drafts; and over
// its life: drafts, accepted drafts, rows dropped inside passes, passes that committed tokens, and drafts of its
// prediction that were accepted and that were not.
typedef enum {
  FASER_NUM_TOKENS,
  FASER_NUM_DRAFTS,
  FASER_NUM_COMPUTED,
  FASER_NUM_DRAFT_COMPUTED,
  FASER_DRAFTERS,
  FASER_MAX_NUM_TOKENS,
  FASER_MAX_DRAFT_LEN,
  FASER_NUM_DRAFTED,
  FASER_NUM_ACCEPTED,
  FASER_NUM_PRUNED,
  FASER_NUM_STEPS,
  FASER_NUM_PREDICTED,
  FASER_NUM_MISPREDICTED,
  FASER_NUM_COUNTS
} faser_count;

// Checks the num_new[i] tokens of sampling[slots[i]].tokens from first[i] on that a drafter reports, where room[i] were
// asked for. Returns the first request with too many or with a token outside the vocabulary; num_requests if none.
int32_t faser_check_drafts(int32_t num_requests, const int32_t* slots, const faser_sampling* sampling,
                           const int32_t* first, const int32_t* num_new, const int32_t* room, int32_t vocab_size);

// Memory of a slot's tokens, end ids and draft sources, for a request with a prediction; else NULL.
typedef struct {
  int32_t* tokens;
  const int32_t* end_ids;
  int64_t num_end_ids;
  const int8_t* draft_sources;
} faser_texts;

typedef enum { FASER_GOES_ON = 0, FASER_STOP = 1, FASER_LENGTH = 2 } faser_end;

// Numbers of a slot's tokens at which its KV blocks need attention: when tokens with the target's or the draft model's
// KV fill a block, and when the tokens, drafts included, leave a block empty.
typedef struct {
  int32_t full, draft_full, spare;
} faser_block_bounds;
typedef enum { FASER_BLOCK_FULL = 1, FASER_BLOCK_SPARE = 2 } faser_due;  // bits

// Commits a step's tokens. By slot: counts [num_slots, FASER_NUM_COUNTS]; times_s [num_slots, 2] of the first and the
// last token, nan before the first; texts and bounds [num_slots]. now_s: time of these tokens. All else is by request.
// num_rows: committed tokens that the pass ran; num_drafted, num_draft_computed: from drafting; num_pruned: may be
// NULL. For the first num_sampled requests, whose rows reach their last tokens: token_ids [num_sampled, stride], the
// first num_new[i] of them valid and the first num_accepted[i] drafts, and outcome, from faser_accept. out_num_new:
// number of output tokens, without those from an end id on; out_end: faser_end; out_due: faser_due; out_tokens [at most
// the sum of num_new]: the output tokens, request by request. Drafts after an end id are not counted, nor is the end id
// as accepted.
int32_t faser_commit(int32_t num_requests, int32_t num_sampled, const int32_t* slots, int32_t* counts, double* times_s,
                     const faser_texts* texts, const faser_block_bounds* bounds, double now_s, const int32_t* num_rows,
                     const int32_t* num_drafted, const int32_t* num_draft_computed, const int32_t* token_ids,
                     int32_t stride, const int32_t* num_new, const int32_t* num_accepted, const int32_t* outcome,
                     const int32_t* num_pruned, int32_t* out_num_new, int32_t* out_end, int32_t* out_due,
                     int32_t* out_tokens);

// Packs a batch's entries and what they point to for an engine with its own memory, into one block of int32 that will
// be at `base` there: num_requests entries, then their parts in turn. An entry's addresses of tokens and sources are
// those of position 0, wherever the part begins. It has the pending drafts num_tokens[i] .. num_tokens[i] +
// num_drafts[i] - 1 and, for requests with penalties or bad words, all tokens before them. num_rows: rows for which
// rejection sampling needs masks and sources; 0: the request's data are not packed; NULL: no masks and sources. The
// last num_branches requests have branch_tokens[k] in place of their last token. draft_probs: 0, or the address there
// of slot 0's draft probabilities, which are probs_bytes apart. Margins and candidates are not packed, end ids only
// while they are banned. out [capacity]; out_is_edited: 1 if an entry edits the logits after its num_tokens[i] tokens.
// Returns the number of int32 needed; if it exceeds the capacity, out is incomplete.
int64_t faser_pack_sampling(int32_t num_requests, const int32_t* slots, const faser_sampling* sampling,
                            const int32_t* num_tokens, const int32_t* num_drafts, const int32_t* num_rows,
                            const int32_t* branch_tokens, int32_t num_branches, int32_t vocab_size, uint64_t base,
                            uint64_t draft_probs, uint64_t probs_bytes, int32_t* out, int64_t capacity,
                            int32_t* out_is_edited);

// Writes the inputs of a pass of such an engine from a batch. Section i of out begins at starts[i]: cu_q_lens
// [max_num_requests + 1], kv_lens [max_num_requests], token_ids, positions, logit_rows [max_num_rows], first_branch
// [max_num_requests + 1; starts < 0: none], and last a row of block_table [num_requests, max_blocks_per_seq] for each
// request, without the blocks after its last position. Unused entries are 0, those of first_branch its last value.
// num_slots, num_columns: of the batch's block table.
typedef struct {
  int32_t vocab_size, max_seq_len, tokens_per_block, num_blocks, max_num_requests, max_num_rows, max_num_branches,
      max_blocks_per_seq;
} faser_pass_limits;
#define FASER_NUM_PASS_INPUTS 7
int32_t faser_fill_inputs(const faser_pass_limits* limits, int32_t num_requests, int32_t num_rows, const int32_t* slots,
                          const int32_t* cu_rows, const int32_t* token_ids, const int32_t* positions,
                          int32_t num_logit_rows, const int32_t* logit_rows, const int32_t* block_table,
                          int32_t num_slots, int32_t num_columns, const int32_t* branch_parents, int32_t num_branches,
                          int32_t* out, const int64_t* starts);

// Writes the drafts of an engine with its own memory to the requests' memory: the draft model's drafts of steps 0, 1,
// .. after num_known[i] tokens, up to the first step with token -1. tokens, margins and runners_up (NULL: none)
// [num_steps, stride], candidates [num_steps, stride, FASER_NUM_CANDIDATES]. out_num_new: number of drafts. Advances
// draft_counter.
int32_t faser_store_drafts(int32_t num_requests, const int32_t* slots, faser_sampling* sampling,
                           const int32_t* num_known, int32_t num_steps, int32_t stride, const int32_t* tokens,
                           const float* margins, const int32_t* candidates, const int32_t* runners_up,
                           int32_t* out_num_new);

// Plans the rows of a draft model's first pass: tokens that it has not seen. counts [FASER_DRAFTERS + 1, num_requests]:
// a column for each of these faser_counts, from when the step was scheduled. num_pending: drafts, including those of
// other drafters in this step; num_new_tokens: committed tokens that the target's pass runs; max_drafts: number of
// pending drafts up to which the model drafts. A request drafts once it decodes and all its rows fit into max_num_rows;
// a prompt is run along with the target. Rows of heads and block drafters follow the target's and end with the last
// committed token; a block drafter drafts only if no drafts are pending. out [FASER_NUM_DRAFT_COLUMNS, num_requests]:
// for the out_num_requests requests that have rows. The remaining outputs and the result are faser_fill_rows' for these
// rows.
typedef enum { FASER_DRAFT_MODEL, FASER_DRAFT_HEAD, FASER_DRAFT_BLOCK } faser_draft_kind;
typedef enum {
  FASER_DRAFT_REQUEST,
  FASER_DRAFT_SLOT,
  FASER_DRAFT_FIRST,  // the rows are those of tokens first .. end - 1
  FASER_DRAFT_END,
  FASER_DRAFT_LOGITS,  // rows with logits: 1 if it drafts
  FASER_DRAFT_TOKENS,  // num_tokens
  FASER_DRAFT_PENDING,
  FASER_DRAFT_NEW,  // drafts wanted
  FASER_NUM_DRAFT_COLUMNS
} faser_draft_column;
int32_t faser_draft_rows(int32_t num_requests, const int32_t* slots, const faser_sampling* sampling,
                         const int32_t* counts, const int32_t* num_pending, const int32_t* num_new_tokens,
                         const int32_t* max_drafts, int32_t kind, int32_t* out, int32_t* out_num_requests,
                         int32_t max_num_rows, int32_t* cu_rows, int32_t* token_ids, int32_t* positions,
                         int32_t* logit_rows, int32_t* out_num_logit_rows);

// Counts the outcome of rejection sampling on another device, as faser_accept counts its own.
int32_t faser_count_tests(int32_t num_requests, const int32_t* slots, faser_sampling* sampling,
                          const int32_t* num_tokens, const int32_t* num_accepted, const int32_t* outcome);

// The reference of `faser bench host`, without a model: num_steps steps of num_requests requests with num_drafts drafts
// each, 70 % of which are accepted, with blocks, rows, verification, commit and end ids. Returns the committed tokens,
// or a negative faser_status.
int64_t faser_host_loop(int32_t num_requests, int32_t num_drafts, int32_t num_steps, uint64_t seed);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
#endif  // FASER_CPU_H_
