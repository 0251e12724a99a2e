// The page's document: what verl_profiler.views.sections gathers, as the scripts read it.
// Only the columns that a script names are listed; times end in _s (seconds) or, in timelines,
// are in units of `unit_s` after the begin of their step.

type Num = number | null;
type MaybeText = string | null;
type Fact = [name: string, value: string | number | null];

/** Rows of a table: the columns' names once, then lists of values; `Row` is what `unpack` makes. */
interface Frame<Row> {
  columns: string[];
  rows: unknown[][];
  /** Never there: it ties the frame to its rows. */
  row?: Row;
}

/** Of one step, or of all steps together where `s` is -1. */
interface OfStep {
  s: number;
}

interface StepRow extends OfStep {
  label: string; step: number; finished: boolean; duration_s: Num; seen_s: Num; gen_s: Num;
  unaccounted_s: Num; testing_s: Num; requests: number; validation_requests: number;
  p50_s: Num; p95_s: Num; max_s: Num; after_p80_s: Num; after_p95_s: Num; spread_s: Num;
  poll_s: Num; longest_phase: MaybeText; longest_share: Num; generated_tokens_per_s: Num;
  engine_tokens_per_s: Num;
}

interface PhaseRow extends OfStep {
  phase: string; duration_s: number; share: Num;
}

/** In preorder; what lies below a row adds up to it. */
interface TreeRow extends OfStep {
  phase: MaybeText; component: MaybeText; tool: MaybeText; duration_s: number;
}

interface PathRow extends OfStep {
  category: string; duration_s: number; share: number; segments: number; longest_s: number;
  longest_what: MaybeText;
}

/** Sums over all steps where `s` is -1. */
interface LedgerRow extends OfStep {
  run?: string; pool: string; account: string; devices: number; device_s: number; share: number;
}

interface ReplayRow {
  run?: string; what: string; saved_s: Num; earlier_s: Num; residual_share: Num; tokens_share: Num;
}

interface StepReplayRow extends ReplayRow, OfStep {
  duration_s: number; least_s: number; most_s: number;
}

interface WhatIfRow extends ReplayRow {
  about: string; steps: number; step_s: number; expected_s: Num; share: Num; low_s: Num; high_s: Num;
  between_runs_s: Num;
}

interface StragglerRow {
  run?: string; kind: string; who: string; of_steps: number; last: number; caused_wait_s: number;
  per_step_s: number; share: number;
}

interface StragglerRequestRow {
  run?: string; step: number; name: string; request_id: MaybeText; caused_wait_s: number;
  behind_s: number; because: string; late_s: Num; queued_s: Num; long_s: Num; slow_s: Num;
  tool_s: Num; other_s: Num; parked_s: Num; cold_s: Num; prefill_s: Num; recomputed_s: Num; undivided_s: Num;
  batch: Num;
  typical_batch: Num;
}

interface Validated extends OfStep {
  validate: boolean;
}

interface RequestTimesRow extends Validated {
  requests: number; unfinished: number; failed: number; mean_s: Num; p50_s: Num; p80_s: Num;
  p90_s: Num; p95_s: Num; p99_s: Num; p999_s: Num; max_s: Num; mean_turns: Num;
  generated_tokens: Num; tool_tokens: Num;
}

interface RequestPartRow extends Validated {
  part: string; total_s: number; share: number; mean_s: number;
}

interface CdfRow extends Validated {
  quantiles_s: number[];
}

/** Counts: of each part in which something changed, its number, the highest and the last count. */
type Counts = [part: number, most: number, last: number][];

interface FlightRow extends OfStep {
  begin_s: number; spread_s: number; most: number; mean: number; counts: Counts;
}

interface TurnTimesRow extends Validated {
  turn: number; turns: number; share: number; mean_s: Num; p50_s: Num; p95_s: Num; max_s: Num;
  engine_s: Num; tool_s: Num; tool_parsing_s: Num; token_merge_s: Num; other_s: Num;
  prompt_tokens: Num; response_tokens: Num; estimated: boolean;
}

interface TurnsPerRequestRow extends Validated {
  turns: number; requests: number; share: number; mean_s: number;
}

interface ToolTimesRow extends Validated {
  tool: string; calls: number; failed: number; total_s: number; p50_s: Num; p95_s: Num;
  p99_s: Num; max_s: Num; share: Num; estimated: boolean;
}

interface EngineTimesRow extends Validated {
  calls: number; total_s: number; p50_s: Num; p95_s: Num; max_s: Num; queue_s: Num;
  prefill_s: Num; decode_s: Num; outside_s: Num; prompt_tokens: Num; generated_tokens: Num;
  cached_tokens: Num; engine_tokens_per_s: Num; estimated: boolean;
}

interface ReplicaRow extends OfStep {
  server: MaybeText; calls: number; total_s: number; p50_s: Num; p95_s: Num; max_s: Num;
  queue_s: Num; prompt_tokens: Num; generated_tokens: Num; engine_tokens_per_s: Num;
}

interface WorkerRow extends OfStep {
  name: string; requests: number; busy_s: number; mean_s: number; behind_s: number;
}

interface RankRow extends OfStep {
  role: string; event: string; ranks: number; slowest: string; slowest_s: number;
  median_s: number; fastest_s: number; waste_s: number;
}

interface SyncRow extends OfStep {
  trainer_s: Num; slowest_rank_s: Num; slowest_rank: MaybeText; transfer_s: Num; release_s: Num;
  resume_s: Num;
}

interface PoolRow {
  run?: string; lane: string; phase: MaybeText; weight_version: Num; mean: Num; begin_s: number;
  end_s: number;
}

interface TransferRow extends OfStep {
  role: string; event: string; calls: number; failed: number; total_s: number; p95_s: Num;
  max_s: number; size_bytes: Num; rows: Num;
}

interface TracedRow {
  func: string; calls: number; failed: number; waits: boolean; total_s: Num; mean_s: Num;
  p95_s: Num; get_share: Num; compute_share: Num; put_share: Num; overhead_share: Num;
  wall_share: Num;
}

interface StallsRow extends OfStep {
  name: string; role: string; loop: MaybeText; lags: number; total_s: number; max_s: number;
}

interface LongestStallRow extends OfStep {
  name: string; role: string; during: MaybeText; duration_s: number; at_s: number;
}

interface MemoryPeakRow extends OfStep {
  role: string; name: string; at: MaybeText; readings: number; allocated_bytes: Num;
  reserved_bytes: Num; used_bytes: Num; total_bytes: Num;
}

interface MemoryPhaseRow extends OfStep {
  phase: string; role: string; readings: number; used_bytes: Num; used_share: Num;
  lowest_used_bytes: Num; rss_bytes: Num; host_used_bytes: Num;
}

interface ReleaseRow {
  role: string; event: string; tags: MaybeText; source: string; calls: number; p50_s: Num;
  max_s: Num;
  moved_bytes: Num; used_before_bytes: Num; used_after_bytes: Num;
}

interface SleepRow extends OfStep {
  release_s: Num; resume_s: Num; slowest: MaybeText; share: Num;
}

interface CostRow extends OfStep {
  events: number; size_bytes: number; dropped: number; wrapper_s: Num; writer_s: Num;
  costliest: MaybeText; costliest_s: Num; share: Num;
}

interface CaptureRow extends OfStep {
  name: string; host: MaybeText; task: MaybeText; tool: MaybeText; file: MaybeText;
  size_bytes: Num; problem: MaybeText; duration_s: Num;
}

interface RangeRow extends OfStep {
  name: string; domain: MaybeText; event: string; ranges: number; total_s: number; max_s: number;
  launches: Num; gpu_s: Num;
}

interface KernelRow extends OfStep {
  name: string; kernel: string; launches: number; total_s: number; max_s: number; share: Num;
}

interface IdleRow extends OfStep {
  host: MaybeText; gpu: number | string; processes: MaybeText; captured_s: number; busy_s: number;
  idle_share: number; gen_idle_share: Num;
}

/** The tables that are at the top of the document. */
interface Tables {
  step_phases: PhaseRow; time_tree: TreeRow; critical_path: PathRow; bubble_ledger: LedgerRow; step_replays: StepReplayRow; what_if: WhatIfRow;
  stragglers: StragglerRow; straggler_requests: StragglerRequestRow;
  request_times: RequestTimesRow; request_parts: RequestPartRow; request_cdf: CdfRow;
  requests_in_flight: FlightRow; turn_times: TurnTimesRow; turns_per_request: TurnsPerRequestRow;
  tool_times: ToolTimesRow; engine_times: EngineTimesRow; replica_balance: ReplicaRow;
  rollout_balance: WorkerRow; rank_balance: RankRow; weight_sync: SyncRow;
  pools_over_time: PoolRow;
  transfer_totals: TransferRow; tq_functions: TracedRow; loop_lags: StallsRow;
  longest_lags: LongestStallRow; memory_peaks: MemoryPeakRow; memory_timeline: MemoryPhaseRow;
  release_effects: ReleaseRow; sleep_times: SleepRow; profiler_cost: CostRow;
  captures: CaptureRow; range_times: RangeRow; top_kernels: KernelRow; gpu_idle: IdleRow;
}

interface ProcessRow {
  name: string; role: string; host: MaybeText; pid: Num; recorded_events: Num; size_bytes: Num;
  dropped: Num; write_errors: Num; end_reason: MaybeText;
}

interface Launch {
  run: string; facts: Fact[]; training?: Fact[]; versions?: Fact[]; settings?: Fact[];
}

/** A request as the document has it: the parts of its time are null where nothing was recorded. */
interface DrawnRequest extends Validated {
  scene: Num; name: string; request_id: MaybeText; sample: MaybeText; session: MaybeText;
  agent: MaybeText; status: MaybeText; error: MaybeText; begin: number; length: number;
  duration_s: Num; turns: Num;
  tool_calls: number; prompt_tokens: Num; generated_tokens: Num; reward: Num;
  prompt_build_s: Num; engine_s: Num; tool_s: Num; tool_parsing_s: Num; token_merge_s: Num;
  postprocess_s: Num; reward_s: Num; other_s: Num;
}

/** Turn, begin, length, server, engine begin and length, queue, prefill, decode, three tokens. */
type PackedCall = (number | null | undefined)[];

interface RequestRow extends DrawnRequest {
  /** Flat: of each span its name's number, its turn (-1: none), begin and length. */
  spans: number[];
  calls: PackedCall[];
  hasCalls: boolean;
}

type SpanName = [event: string, tool: MaybeText, failed: number, color: string];
type PackedSpan = [code: number, begin: number, length: number];

interface AnyLane {
  name: string; role: string;
  /** How many processes of the role are shown, and how many there are. */
  role_of?: [shown: number, all: number];
  lags?: [begin: number, length: number, during?: string][];
}
interface SpansLane extends AnyLane { kind: 'spans'; of: number; spans: PackedSpan[] }
interface RequestsLane extends AnyLane {
  kind: 'requests'; of: number; drawn: number;
  /** When its last request ended, drawn or not. */
  last: number;
}
interface CountLane extends AnyLane { kind: 'count'; code: number; most: number; counts: Counts }
type Lane = SpansLane | RequestsLane | CountLane;

/** One timeline: the requests of a step, or of a validation pass. */
interface Scene extends Validated {
  requests: number; begin: number; end: number; lanes: Lane[];
}

interface Timelines {
  unit_s: number; names: SpanName[]; scenes: Scene[]; of: number;
  requests: Frame<DrawnRequest> & {spans: number[][]; calls: PackedCall[][]; servers: string[]};
}

/** A view's own table, and what its columns hold. */
interface PageView {
  question: string; charts: Record<string, any>[]; missing: string[];
  table: Frame<Record<string, any>>; columns: Record<string, string>; labels: Record<string, string>;
}

interface PageSection {
  name: string; title: string; link: string; topic: MaybeText; questions: string[];
  /** Those that it shows, and those whose numbers it has. */
  views: string[]; answers: string[];
}

/** Where a mean step of a run goes; parts are largest first. */
interface MeanStep {
  run: string; whole_s: number;
  parts: [name: string, seconds: number, about: string, color: string][];
}

/** How late workers end: of each column its first and last step; cells by worker and column. */
interface WorkerHeat {
  workers: string[]; others: number; columns: [first: number, last: number][];
  cells: ([behind_s: number, step: number] | null)[][];
}

type PageDocument = {[Name in keyof Tables]: Frame<Tables[Name]>} & {
  about: {
    runs: string[]; line: string[]; events: number;
    launches: Launch[]; missed: [probe: string, reason: string, where: string][];
    processes: Frame<ProcessRow>; notes: string[];
  };
  mean_step: MeanStep[]; steps: Frame<StepRow>; detailed: number[]; fractions: number[]; computing: string[];
  worker_heat: WorkerHeat | null;
  timelines: Timelines; problems: string[]; notes: Record<string, string[]>; tq_findings: string[];
  sections: PageSection[]; views: Record<string, PageView>; colors: Record<string, string>;
  /** What each account of the device time is. */
  accounts: Record<string, string>;
  /** Whose devices each pool has. */
  pools: Record<string, string>;
  /** Colors of weight versions; they repeat. */
  versions: string[];
};
