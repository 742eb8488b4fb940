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

#define FASER_ABI_VERSION 24
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
// The instruction set in use: "amxbf16", "avx512bf16", "avx2" or "portable" (chosen once; FASER_CPU_ISA=<name> lowers
// it).
const char* faser_isa(void);

// Thread pool: a partition of the CPU. The calling thread is worker 0.
// cores: [num_threads] ids to pin workers 1.. to, or NULL for no pinning. Idle workers spin for spin_us, then sleep.
typedef struct faser_pool faser_pool;
faser_pool* faser_pool_create(const int32_t* cores, int32_t num_threads, int32_t spin_us);
int32_t faser_pool_num_threads(const faser_pool* pool);
void faser_pool_destroy(faser_pool* pool);

// Model: pointers into memory that outlives the engine (the memory-mapped engine file).
// Packed matrix [out, in]: ceil(out / 64) panels, each [in_padded / 2][64] uint32; element [i][j] holds the bf16
// weights of output 64 * panel + j for inputs 2i (low half) and 2i + 1 (high half). in_padded = in rounded up to 32;
// padding is zero. Quantised (weight_bits 8 or 4): panels of [in_padded / n][64] uint32, n = 32 / weight_bits; a word
// has the integers of one output for n neighbouring inputs, in two's complement, the first input in the lowest bits.
// Scales [panel][in / group_size, or 1][64] fp32: weight = integer * scale; padded outputs have scale 0. All pointers
// are 64-byte aligned. Norm weights and biases are fp32.
typedef struct {
  const float* input_norm;  // [hidden]
  const uint32_t* qkv;      // packed [(num_heads + 2 * num_kv_heads) * head_dim, hidden]: all q heads, k heads, v heads
  const float* qkv_bias;    // [(num_heads + 2 * num_kv_heads) * head_dim] or NULL
  const float* q_norm;      // [head_dim] or NULL: RMSNorm of each q head before rope (Qwen3)
  const float* k_norm;      // [head_dim] or NULL
  const uint32_t* o;        // packed [hidden, num_heads * head_dim]
  const float* o_bias;      // [hidden] or NULL
  const float* post_norm;   // [hidden]
  const uint32_t*
      gate_up;  // packed [2 * padded(intermediate), hidden]: gate rows, then up rows; each part padded to 64
  const float* gate_up_bias;                                          // [2 * padded(intermediate)] or NULL
  const uint32_t* down;                                               // packed [hidden, intermediate]
  const float* down_bias;                                             // [hidden] or NULL
  const float *qkv_scales, *o_scales, *gate_up_scales, *down_scales;  // NULL unless quantised
  // Of a mixture's layer (faser_experts); its gate_up, down, their scales and biases are num_experts matrices' of one
  // expert each, one after the other, all padded to whole panels. router, shared_gate: always bf16.
  const uint32_t* router;                                   // packed [num_experts, hidden]
  const float* router_bias;                                 // [num_experts] or NULL
  const uint32_t *shared_gate_up, *shared_down;             // of an expert of shared_size
  const uint32_t* shared_gate;                              // packed [1, hidden]
  const float *shared_gate_up_scales, *shared_down_scales;  // NULL unless quantised
  const float* sinks;  // [num_heads] one more logit of each head's softmax, whose share is dropped, or NULL
} faser_layer;

// A mixture's layers: a row goes through the top_k experts of the highest scores, of equal ones those of the lowest
// index, and adds their outputs, weighted, in ascending order of index.
typedef enum {
  FASER_SOFTMAX = 0,        // scores and weights are a softmax over all experts
  FASER_TOP_K_SOFTMAX = 1,  // scores are the router's logits, weights a softmax over those that are taken
} faser_scoring;

typedef enum {
  FASER_SILU = 0,     // silu(gate) * up
  FASER_CLAMPED = 1,  // (up + 1) * gate * sigmoid(1.702 gate), gate at most 7 and up within -7 and 7
} faser_activation;

typedef struct {
  int32_t num_experts, top_k;
  int32_t scoring;      // a faser_scoring
  int32_t norm_topk;    // 1: a row's weights are divided by their sum; of FASER_SOFTMAX
  int32_t activation;   // a faser_activation
  int32_t shared_size;  // width of an expert that all rows take, times sigmoid(shared_gate x); 0: none
  int32_t is_mxfp4;     // 1: gate_up and down have e2m1 numbers of four bits and groups of 32, in a model of bf16
} faser_experts;

// What an EAGLE-3 head (arXiv 2503.01840) or an MTP layer has besides a decoder's layers. Its row of the token at
// position t takes the target's hidden rows of position t - 1, or, where those are not there yet, its own output of
// position t - 1. The normed embedding and then the normed hidden row are the input of qkv in an EAGLE-3 head's first
// layer, which is packed [.., 2 * hidden], and an MTP layer's input of input_proj, after which it is a decoder's layer.
// The other layers of a head are a decoder's. Position 0 has no hidden row before it, so no other row sees it.
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
  int32_t reads_normed;          // 1: the target's last hidden row is read after its final norm
  int32_t feeds_normed;  // 1: the output that the next position takes is after the final norm, as an MTP layer's
  int32_t num_fc_norms;  // 0; 1: what fc reads is normed as one row; more: in so many parts of one size
  const float* fc_norm;  // [num_features], or NULL
} faser_head;

// Medusa heads (arXiv 2401.10774). Head i reads the target's last hidden row of a position, after its final norm, and
// predicts the token i + 2 positions on: num_layers residual blocks, x + silu(W x + b), and an LM head.
typedef struct {
  const uint32_t* residual;    // packed [hidden, hidden], num_heads * num_layers of them
  const float* residual_bias;  // [num_heads * num_layers, padded(hidden)]
  int32_t num_heads, num_layers;
} faser_medusa;

// A convolution over the rows of a block before (0) and after (1) a sublayer, causal: out of row t = sum over taps of
// (base + delta of row t) * in of row t - tap, where that is one of the block's. The deltas, one for each group of
// channels, are made of the sublayer's normed input.
typedef struct {
  const float* base;      // [2, taps, hidden]
  const uint32_t* delta;  // packed [2 * taps * hidden / group, hidden]
} faser_conv;

// What a block drafter (DFlash, DFlash2, DSpark) has besides a decoder's layers. A context row of position p is made of
// the target's hidden rows of that position, hidden_norm(fc x), and all that is kept of it are its keys and values: of
// each layer those parts of qkv, without its input_norm. A block is block_size rows, the last committed token's and
// then mask_token_id's, at the positions from that token's on; they see the context before it and each other. The row
// first_slot + k gives the logits of draft k: logit_scale times the LM head's, then, unless 0, logit_softcap * tanh(x /
// logit_softcap); with markov_rank also markov_out times the row of markov_in of the token before the draft. With
// selector_rank only the selector_top_k best tokens can be drafted, and to the logit of token b comes the sum of
// predecessors[a] * successors[b] * (selector_proj times the normed row), a being the token before the draft.
typedef struct {
  const uint32_t* fc;                             // packed [hidden, num_features]
  const float* hidden_norm;                       // [hidden]
  const uint16_t* markov_in;                      // bf16 [vocab_size, markov_rank] row-major, or NULL
  const uint32_t* markov_out;                     // packed [vocab_size, markov_rank], or NULL
  const uint16_t *predecessors, *successors;      // bf16 [vocab_size, selector_rank] row-major, or NULL
  const uint32_t* selector_proj;                  // packed [selector_rank, hidden], or NULL
  const faser_conv *attention_convs, *mlp_convs;  // [num_layers], or NULL
  const int32_t* causal;                          // [num_layers] 1: no row of a block sees those after it
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
  const int32_t* windows;       // [num_layers] tokens that a row sees, itself included; 0: all; NULL: all in all layers
  const faser_head* head;       // NULL: a decoder; else with an embedding, and one layer if it is an MTP layer's
  const faser_medusa* medusa;   // NULL; else num_layers is 1, its layer is empty, and lm_head has num_heads matrices
  const faser_block* block;     // NULL; else a block drafter, with an embedding unless lm_head is tied
  const faser_experts* experts;  // NULL: all layers are dense; else a decoder, and intermediate_size is an expert's
  const float* lm_head_scales;   // NULL: the LM head is bf16
  int32_t weight_bits;           // of the layers' matrices: 16 (bf16), 8 or 4
  int32_t group_size;  // inputs that share a scale: 32 or 128, dividing every matrix's inputs; 0: all (8 bits)
  // Of the inputs of quantised matrices: 16 (bf16), or 8: integers, a scale for each row and group of group_size inputs
  // (128 where that is 0), the group's largest magnitude / 127. No head's.
  int32_t activation_bits;
  // Of a draft model with fewer tokens than its target: lm_head is packed [num_outputs, hidden], and the other tokens
  // have logit -inf. Such a model has an embedding.
  int32_t num_outputs;
  const int32_t* output_ids;  // [num_outputs] rising token ids of lm_head's outputs, or NULL: the same
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
int32_t faser_engine_num_layers(const faser_engine* engine);
int32_t faser_engine_vocab_size(const faser_engine* engine);

// Experts that the last pass read, of a layer: the mean over the layers that ran, its segments together. 0: there are
// none, or no row.
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
  // The last num_branches requests are one row each: another token in the place of a row of request branch_parents[k]
  // [num_branches], which comes before them. A branch's blocks are its parent's up to the one that holds its row; of
  // that, a block of its own, it has the KV of the tokens before this pass (faser_engine_copy_kv), and gets its
  // parent's rows before its place.
  const int32_t* branch_parents;
  int32_t num_branches;
} faser_batch;

// Runs layers [first_layer, last_layer). first_layer == 0 embeds the tokens; otherwise it continues with the hidden
// rows of the previous call on this engine (rows dropped in between are removed with faser_engine_compact_rows). With
// last_layer == num_layers: final norm and LM head of the rows listed in logit_rows (indices into the batch's rows,
// ascending) into logits [num_logit_rows, logits_stride].
int32_t faser_engine_forward(faser_engine* engine, const faser_batch* batch, int32_t first_layer, int32_t last_layer,
                             const int32_t* logit_rows, int32_t num_logit_rows, float* logits);
// Gives a head its target, before the first pass of either: from then on the target's passes keep, by block and offset
// as KV, its hidden rows on entering these layers (ascending; its num_layers: on leaving the last one), rounded to
// bf16. Medusa heads take the num_layers alone, and its rows are kept after the final norm. The target outlives the
// head and has as many blocks. A pass of the head must come after the target's pass over the position before each of
// its rows, of a block drafter over the position of each of its rows. faser_engine_forward of a block drafter runs
// context rows and gives no logits. A further head may take the place of one before it, if it reads the same rows.
int32_t faser_engine_attach_head(faser_engine* head, faser_engine* target, const int32_t* layers, int32_t num_layers);
// Keeps the listed hidden rows (ascending) and drops the others; later calls must pass a matching batch.
int32_t faser_engine_compact_rows(faser_engine* engine, const int32_t* rows, int32_t num_rows);
// Between two segments: final norm of the hidden rows listed, times the LM head rows of each row's own candidates, in
// fp32. candidates, scores: [num_rows, num_candidates]; a candidate of -1 scores -inf. Hidden rows are unchanged.
int32_t faser_engine_early_exit(faser_engine* engine, const int32_t* rows, int32_t num_rows, const int32_t* candidates,
                                int32_t num_candidates, float* scores);
// Copies the hidden rows between two segments, for tests: hidden [num_rows, hidden_size]; num_rows as in the last call.
int32_t faser_engine_hidden_rows(const faser_engine* engine, int32_t num_rows, float* hidden);
// Copies the KV of the tokens at offsets first[i] .. end[i] - 1 of block from[i] to those of block to[i], and what is
// kept of them for a head. Up to 15 tokens before and after are copied with them, but not for the head.
int32_t faser_engine_copy_kv(faser_engine* engine, int32_t num_copies, const int32_t* from, const int32_t* to,
                             const int32_t* first, const int32_t* end);
// Switches the engine to another pool from the next call on. Results are the same.
int32_t faser_engine_set_pool(faser_engine* engine, faser_pool* pool);

// Sampling
typedef enum { FASER_GREEDY = 0, FASER_SEEDED = 1, FASER_SAMPLED = 2 } faser_sampling_mode;

// Who proposed a pending draft. The draft model draws from q; the suffix automaton's draft is certain, so there is no
// q.
// Those of a prediction are counted with the automaton's.
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
                         // Top-1 minus top-2 of the edited logits; FASER_SEEDED: temperature times the gumbel max lead
                         // (draw.h), the same difference with the noise that draft and target share added.
                         // FASER_BY_SUFFIX: the log-odds that the draft is accepted
  int32_t* draft_candidates;  // NULL, or by position: [FASER_NUM_CANDIDATES] best ids of those logits, best first, -1
                              // where fewer are possible; a draft that is not among them is put last
  int8_t* draft_sources;      // NULL (all are the model's), or by position: faser_draft_source
  const int32_t* end_ids;     // banned while fewer than min_tokens tokens were generated
  const int32_t* bias_ids;    // logit bias
  const float* bias_values;
  const int32_t* bad_words;     // all bad words' ids, concatenated
  const int32_t* cu_bad_words;  // [num_bad_words + 1]
  uint64_t key;                 // FASER_SEEDED: the user's seed; FASER_SAMPLED: random, unique per request
  uint64_t draft_counter;       // FASER_SAMPLED: advanced by each drafted token, so that no random number is reused
  int64_t num_tested[FASER_NUM_SOURCES], num_passed[FASER_NUM_SOURCES];  // drafts of the slot since it is there, which
                                                                         // faser_accept counts
  int32_t num_end_ids, num_bias, num_bad_words;
  int32_t prompt_len;
  int32_t min_tokens;
  int32_t mode;              // faser_sampling_mode
  int32_t top_k;             // 0: off
  float temperature;         // > 0 unless greedy
  float top_p;               // 1: off
  float min_p;               // 0: off
  float repetition_penalty;  // 1: off; over prompt and output, logits > 0 divided, <= 0 multiplied
  float presence_penalty;    // 0: off; over prompt and output, as TensorRT-LLM counts
  float frequency_penalty;   // 0: off
  int32_t num_mask_rows;     // of masks
  const uint32_t* masks;  // NULL, or by position % num_mask_rows: [ceil(vocab_size / 32)] words; token v is allowed at
                          // that position only if bit v % 32 of word v / 32 is set
  faser_fill_masks fill_masks;  // NULL, or writes masks; faser_draft and faser_sample_draft call it, faser_accept
                                // expects the masks of its rows
  int32_t* draft_runners_up;    // NULL, or by position: what the draft model would have drafted had the draft not been
                                // possible, -1 for none (FASER_SAMPLED: the best of the edited logits but the draft)
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
// then at most one recovered or bonus token), their number, how many were accepted drafts, an outcome and a row status.
typedef enum {
  FASER_STILL_PENDING = 0,  // the last live row's test passed: later drafts stay pending, nothing was drawn
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

// Drafts from the request's own text, prompt and output: what most often followed the longest suffix that occurred
// before, of equals what followed last. One automaton per slot, of at most max_tokens tokens: then it begins anew with
// the later half. faser_suffix_memory_bytes: held now.
typedef struct faser_suffix faser_suffix;
faser_suffix* faser_suffix_create(int32_t max_batch_size, int32_t max_tokens, int32_t* status);
void faser_suffix_destroy(faser_suffix* suffix);
int64_t faser_suffix_memory_bytes(const faser_suffix* suffix);
// The slot's request ends: its text is forgotten.
int32_t faser_suffix_reset(faser_suffix* suffix, int32_t slot);
// The slot's request begins, and its output is expected to repeat these tokens: they come before its text, and its
// output is taken to begin as they do. only_prediction: nothing else is proposed.
int32_t faser_suffix_predict(faser_suffix* suffix, int32_t slot, const int32_t* tokens, int32_t num_tokens,
                             int32_t only_prediction);
// Takes in what was committed since the last call, then proposes up to num_new_drafts[i] drafts after num_drafts[i]
// pending ones, each with its source, its log-odds of acceptance as margin, and itself as candidate. It ends where
// nothing matches, where a row would hardly be reached, and before place num_model[i] (up to which the draft model
// would draft) where the draft model is surer.
int32_t faser_suffix_draft(faser_suffix* suffix, int32_t num_requests, const int32_t* slots, faser_sampling* sampling,
                           const int32_t* num_tokens, const int32_t* num_drafts, const int32_t* num_new_drafts,
                           const int32_t* num_model, int32_t* out_num_new);

// Early stopping of drafting. A draft at place j (0: the first pending one) with margin m, of a request with sampling
// mode s, is accepted with probability sigmoid(slope[s][j] * m + intercept[s][j]); survival is the product over a
// request's pending drafts. After each draft, the next one is worth the mean of max(0, survival * probability -
// row_price[j + 1]) over the probabilities prior[s][j + 1] +- spread[s][j + 1]: a request stops when neither pays, and
// all stop when the sum over the continuing requests is below step_price[their number].
typedef struct {
  const float *slope, *intercept, *prior, *spread;  // [modes, stride]
  const float* row_price;                           // [max_draft_len]
  const float* step_price;                          // [num_requests + 1]
  int32_t stride;                                   // >= max_draft_len
} faser_draft_stop;

// The survival of the first num_drafts[i] pending drafts after num_tokens[i] committed tokens, of each request: 1
// without any. FASER_BAD_ARGUMENT for a slot without margins that has some.
int32_t faser_pending_survival(const faser_draft_stop* stop, int32_t num_requests, const int32_t* slots,
                               const faser_sampling* sampling, const int32_t* num_tokens, const int32_t* num_drafts,
                               double* out_survival);

// Drafting in one call. The batch's rows bring each request's draft KV up to its last known token (committed or pending
// draft; of a head: the last committed one, after which it runs the pending drafts itself, from its own output; of a
// block drafter: the last committed one, where no drafts are pending, and at most the drafts of one block); then
// request i drafts num_new_drafts[i] >= 0 tokens, appended to sampling[slot].tokens after num_tokens[i] +
// num_drafts[i], each drawn from the same edited distribution as the target's (greedy: argmax; seeded: the shared
// noise; sampled: q kept in draft_probs). A row with NaN logits or an empty distribution ends that request's drafting.
// stop: NULL, or ends drafting early (needs draft_margins of every drafting request).
// out_num_new: [num_requests] tokens drafted. logits: workspace [max_num_requests, logits_stride], of
// a block drafter [max_num_tokens, logits_stride].
int32_t faser_draft(faser_engine* engine, faser_pool* pool, const faser_batch* batch, faser_sampling* sampling,
                    const int32_t* num_tokens, const int32_t* num_drafts, const int32_t* num_new_drafts,
                    int32_t max_draft_len, const faser_draft_stop* stop, float* logits, int32_t* out_num_new);

// What slots cost: rows that verify a draft each, and the draft steps that make them.
typedef struct {
  const double* verify_ms;                       // [num_costs] of a pass, by its number of slots
  const double *draft_first_ms, *draft_step_ms;  // [num_requests + 1] by requests that draft; NULL: drafts are there
  double fixed_ms;                               // of a step with slots, next to these
  double base_tokens;                            // of a step without slots
  double price;                                  // tokens per ms; 0: the ratio of tokens to ms is maximised
  int32_t num_costs;                             // more slots cost what the last one costs
  int32_t multiple;                              // only such numbers of slots are looked at; 1: all
} faser_slot_costs;

// The slots that pay: of all requests' slots, ranked by survival, the number with the most tokens - price * ms (none
// included), or, where price is 0, with the most tokens / ms (one at least, where there is one). survival
// [num_requests, stride]: that all drafts of the request up to this place are accepted; it never rises along a request;
// limits [num_requests]: places that there are. out_lengths [num_requests]; out_score: of the best number.
int32_t faser_best_slots(const faser_slot_costs* costs, int32_t num_requests, int32_t stride, const double* survival,
                         const int32_t* limits, int32_t* out_lengths, double* out_score);

// How likely a draft is accepted: at place j (0: the first pending one) with margin m, of sampling mode s,
// sigmoid(slope[s][j] * min(m, max_margin) + intercept[s][j]).
typedef struct {
  const float *slope, *intercept;  // [modes, stride]
  double max_margin;
  int32_t stride;  // most drafts that are pending
} faser_acceptance;

// How many drafts of each request a pass verifies: faser_best_slots over the pending drafts of a batch, with the
// survivals that their margins tell. num_tokens, num_pending [num_requests]: committed tokens, and drafts after them.
int32_t faser_verify_lengths(const faser_slot_costs* costs, const faser_acceptance* acceptance, int32_t num_requests,
                             const int32_t* slots, const faser_sampling* sampling, const int32_t* num_tokens,
                             const int32_t* num_pending, int32_t* out_lengths);

// Which rows are worth running next to those of drafts: at place j of request i (its row j, 0 ..
// num_verified[i], that tests a pending draft) the draft model's runner-up, which may be what the target says instead.
// Its worth is the probability that the test is reached, fails and recovers it, for which a share of rejections counts.
// The most worthy max_branches of each request, of min_worth at least, in the order of requests and places, up to
// max_num of all. trades: each takes the row of its request's last draft, if that is less likely to be reached, and
// num_verified falls. out_requests (indices), out_places, out_tokens [max_num]. Returns their number.
int32_t faser_pick_branches(int32_t num_requests, const int32_t* slots, const faser_sampling* sampling,
                            const int32_t* num_tokens, const int32_t* num_pending, int32_t* num_verified,
                            const faser_acceptance* acceptance, int32_t trades, double min_worth, int32_t max_branches,
                            int32_t max_num, int32_t* out_requests, int32_t* out_places, int32_t* out_tokens);

// Log-odds that the first num_drafts[i] pending drafts of each request are accepted, of all requests in turn, at most
// max_log_odds from 0: out [sum of num_drafts].
int32_t faser_log_odds(const faser_acceptance* acceptance, double max_log_odds, int32_t num_requests,
                       const int32_t* slots, const faser_sampling* sampling, const int32_t* num_tokens,
                       const int32_t* num_drafts, float* out);

// What the rows of those drafts are asked at a segment boundary: out_candidates [sum of num_drafts,
// FASER_NUM_CANDIDATES], and out_places [sum of num_drafts] of the drafts among them, 0 for one that is not there.
int32_t faser_exit_drafts(int32_t num_requests, const int32_t* slots, const faser_sampling* sampling,
                          const int32_t* num_tokens, const int32_t* num_drafts, int32_t* out_candidates,
                          int32_t* out_places);

// Sums over tested drafts, for a fit of faser_acceptance: p is the estimate before the test, y 1 if it passed and 0 if
// not, m the margin, w = p (1 - p).
typedef struct {
  double* cells;  // [modes, stride, 7] sums of 1, y, (y - p) m, y - p, w m m, w m, w
  double* bins;   // [3, num_bins] by p: sums of 1, p, y
  int32_t num_bins;
} faser_test_sums;

// Adds what rejection sampling found. num_tokens: committed before it; num_accepted, outcome: as faser_accept told
// them.
int32_t faser_add_tests(const faser_test_sums* sums, const faser_acceptance* acceptance, int32_t num_requests,
                        const int32_t* slots, const faser_sampling* sampling, const int32_t* num_tokens,
                        const int32_t* num_accepted, const int32_t* outcome);

// The rows of a batch: of request i the tokens at positions first[i] .. end[i] - 1 of sampling[slots[i]].tokens, of
// which the last num_logit_rows[i] produce logits. cu_rows [num_requests + 1]; token_ids, positions, logit_rows
// [max_num_rows]; out_num_logit_rows: one number. Returns the number of rows; FASER_BAD_ARGUMENT if they do not fit, a
// request has none, or a slot no tokens.
int32_t faser_fill_rows(int32_t num_requests, const int32_t* slots, const faser_sampling* sampling,
                        const int32_t* first, const int32_t* end, const int32_t* num_logit_rows, int32_t max_num_rows,
                        int32_t* cu_rows, int32_t* token_ids, int32_t* positions, int32_t* logit_rows,
                        int32_t* out_num_logit_rows);

// What is counted of a request: committed tokens, pending drafts, tokens with the target's and with the draft model's
// KV, who may draft for it (bits by faser_draft_source), the most tokens and pending drafts; and over its life drafts,
// those that passed, rows dropped inside passes, passes that committed tokens, and drafts of its prediction that passed
// and that did not.
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

// Checks what a drafter says it wrote, num_new[i] tokens of sampling[slots[i]].tokens from first[i] on, where room[i]
// of a vocabulary were asked for -> the first request of which that cannot be; num_requests: none.
int32_t faser_check_drafts(int32_t num_requests, const int32_t* slots, const faser_sampling* sampling,
                           const int32_t* first, const int32_t* num_new, const int32_t* room, int32_t vocab_size);

// Where a slot's tokens and end ids are, and who drafted, of a request with a prediction; else NULL.
typedef struct {
  int32_t* tokens;
  const int32_t* end_ids;
  int64_t num_end_ids;
  const int8_t* draft_sources;
} faser_texts;

typedef enum { FASER_GOES_ON = 0, FASER_STOP = 1, FASER_LENGTH = 2 } faser_end;

// Tokens of a slot at which its KV blocks have to be looked at: so many with the target's or the draft model's KV fill
// a block, and so few, drafts included, leave one empty.
typedef struct {
  int32_t full, draft_full, spare;
} faser_block_bounds;
typedef enum { FASER_BLOCK_FULL = 1, FASER_BLOCK_SPARE = 2 } faser_due;  // bits

// Commits a step's tokens. counts [num_slots, FASER_NUM_COUNTS], times_s [num_slots, 2], of the first and the last
// token, nan before the first, texts and bounds [num_slots] by slot; now_s: of these tokens. All else by request:
// num_rows: committed tokens that the pass ran; num_drafted, num_draft_computed: as drafting told them; num_pruned: may
// be NULL. Of the first num_sampled requests, whose rows reach their last tokens: token_ids [num_sampled, stride],
// of which num_new[i] count and num_accepted[i] were drafts, and outcome, as faser_accept tells it. out_num_new: tokens
// that are output, less those from an end id on; out_end: faser_end; out_tokens [sum of num_new, at most]: the tokens
// that are output, of all requests in turn. Drafts after an end id are not counted, and the end id not as accepted.
int32_t faser_commit(int32_t num_requests, int32_t num_sampled, const int32_t* slots, int32_t* counts, double* times_s,
                     const faser_texts* texts, const faser_block_bounds* bounds, double now_s, const int32_t* num_rows,
                     const int32_t* num_drafted, const int32_t* num_draft_computed, const int32_t* token_ids,
                     int32_t stride, const int32_t* num_new, const int32_t* num_accepted, const int32_t* outcome,
                     const int32_t* num_pruned, int32_t* out_num_new, int32_t* out_end, int32_t* out_due,
                     int32_t* out_tokens);

// Entries of a batch for an engine with memory of its own, and what they point to, as one block of int32 that will be
// at `base` there: num_requests entries, then their pieces in turn. Addresses of an entry's tokens and sources are
// those of position 0, wherever the piece begins: the pending drafts num_tokens[i] .. num_tokens[i] + num_drafts[i] -
// 1, and of requests with penalties or bad words all tokens before them. num_rows: of the masks and sources that
// rejection sampling of so many rows reads, of none: nothing of the request; NULL: no masks and sources. The last
// num_branches requests have branch_tokens[k] in the place of their last token. draft_probs: 0, or the address there of
// slot 0's draft probabilities, probs_bytes apart. Margins and candidates are not packed, end ids only while they are
// banned. out [capacity]; out_is_edited: whether an entry edits the logits after its num_tokens[i] tokens. Returns how
// many int32 that takes: if more than the capacity, out is not complete.
int64_t faser_pack_sampling(int32_t num_requests, const int32_t* slots, const faser_sampling* sampling,
                            const int32_t* num_tokens, const int32_t* num_drafts, const int32_t* num_rows,
                            const int32_t* branch_tokens, int32_t num_branches, int32_t vocab_size, uint64_t base,
                            uint64_t draft_probs, uint64_t probs_bytes, int32_t* out, int64_t capacity,
                            int32_t* out_is_edited);

// The inputs of a pass of such an engine, from a batch. Sections of out, each where starts[k] says: cu_q_lens
// [max_num_requests + 1], kv_lens [max_num_requests], token_ids, positions, logit_rows [max_num_rows], first_branch
// [max_num_requests + 1; starts < 0: none], and last a row of block_table [num_requests, max_blocks_per_seq] for each
// request, whose blocks after its batch's last position are not written. What no row uses is 0, first_branch its last
// value. num_slots, num_columns: of the batch's block table.
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

// Writes what an engine with memory of its own drafted to the requests' memory: the draft model's drafts of step 0, 1,
// .. after num_known[i] tokens, up to the first step with token -1. tokens, margins and runners_up (or NULL: none)
// [num_steps, stride], candidates [num_steps, stride, FASER_NUM_CANDIDATES]. out_num_new: their number. Advances
// draft_counter.
int32_t faser_store_drafts(int32_t num_requests, const int32_t* slots, faser_sampling* sampling,
                           const int32_t* num_known, int32_t num_steps, int32_t stride, const int32_t* tokens,
                           const float* margins, const int32_t* candidates, const int32_t* runners_up,
                           int32_t* out_num_new);

// The rows of a draft model's first pass: tokens that it has not seen, of the requests that have a part in it. counts
// [FASER_DRAFTERS + 1, num_requests]: a column of each of these faser_counts, as of when the step was scheduled.
// num_pending: drafts, with those of other drafters in this step; num_new_tokens: committed tokens that the target's
// pass runs; max_drafts: pending drafts up to which the model drafts. A request drafts once it decodes and all of its
// rows fit into max_num_rows; a prompt is followed. A head's and a block drafter's rows follow the target's, and
// end with the last committed token; a block drafter drafts where no drafts are pending. out [FASER_NUM_DRAFT_COLUMNS,
// num_requests]: of the out_num_requests requests that have rows. What follows, and the result, is faser_fill_rows' for
// these rows.
typedef enum { FASER_DRAFT_MODEL, FASER_DRAFT_HEAD, FASER_DRAFT_BLOCK } faser_draft_kind;
typedef enum {
  FASER_DRAFT_REQUEST,
  FASER_DRAFT_SLOT,
  FASER_DRAFT_FIRST,  // rows are those of tokens first .. end - 1
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

// Counts what a test elsewhere found, as faser_accept does by itself.
int32_t faser_count_tests(int32_t num_requests, const int32_t* slots, faser_sampling* sampling,
                          const int32_t* num_tokens, const int32_t* num_accepted, const int32_t* outcome);

// The reference of `faser bench host`: num_steps steps of num_requests requests with num_drafts drafts each, of which
// 70 % pass, and no model: blocks, rows, test, commit and end ids -> committed tokens, or a negative faser_status.
int64_t faser_host_loop(int32_t num_requests, int32_t num_drafts, int32_t num_steps, uint64_t seed);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
#endif  // FASER_CPU_H_
