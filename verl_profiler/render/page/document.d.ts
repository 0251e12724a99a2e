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
  label: string; step: number; finished: boolean; seen_s: Num; requests: number;
  validation_requests: number;
}

/** In preorder; what lies below a row adds up to it. */
interface TreeRow extends OfStep {
  phase: MaybeText; component: MaybeText; tool: MaybeText; duration_s: number;
}

interface Validated extends OfStep {
  validate: boolean;
}

/** Counts: of each part in which something changed, its number, the highest and the last count. */
type Counts = [part: number, most: number, last: number][];

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
  /** The label of its step. */
  step: string;
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

type ShownColumn = [
  name: string, title: string, format: import('./table.js').Format | '', sentence: string,
];

/** A view's own table, and how its columns are shown. */
interface PageView {
  question: string; charts: Record<string, any>[]; missing: string[];
  table: Frame<Record<string, any>>;
  columns: ShownColumn[];
}

interface PageSection {
  name: string; title: string; link: string; topic: MaybeText; views: string[]; notes: string[];
}

/** Where a mean step of a run goes; parts are largest first. */
interface MeanStep {
  run: string; whole_s: number;
  parts: [name: string, seconds: number, about: string, color: string][];
}

interface PageDocument {
  about: {
    runs: string[]; line: string[]; launches: Launch[]; notes: string[];
  };
  mean_step: MeanStep[]; steps: Frame<StepRow>; time_tree: Frame<TreeRow>;
  columns: Record<'steps' | 'requests', ShownColumn[]>; detailed: number[]; computing: string[];
  timelines: Timelines; problems: string[]; notes: Record<string, string[]>;
  sections: PageSection[]; views: Record<string, PageView>; colors: Record<string, string>;
}
