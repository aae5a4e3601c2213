// Runs as the server tells of them, and as a workflow keeps them: checked, for both may hold anything.
import { KINDS } from "./plan.js";

export const KEPT_AS = "toma_run";
const MOST_EVALUATIONS = 200, MOST_STEPS = 10000, LONGEST = 300;

const number = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);
const text = (value) => (typeof value === "string" ? value.slice(0, LONGEST) : "");
const within = (value, low, high) => Math.min(Math.max(number(value) ?? low, low), high);

/** {run, over, steps, evaluations: [{step, kind, why, off, work}], summary, settings, ...} or null. */
export function readRun(told) {
  if (typeof told !== "object" || told === null || !Array.isArray(told.evaluations) || !text(told.run)) return null;
  const steps = Math.trunc(within(told.steps, 1, MOST_STEPS));
  const evaluations = told.evaluations.slice(0, MOST_EVALUATIONS).map((row) => readRow(row, steps));
  return {
    run: text(told.run),
    over: told.over === true,
    finished: told.finished === true,
    steps,
    asked: number(told.asked),
    tolerance: within(told.tolerance, 0, 1),
    evaluations: evaluations.filter(Boolean),
    summary: text(told.summary),
    notes: (Array.isArray(told.notes) ? told.notes : []).slice(0, 8).map(text).filter(Boolean),
    settings: readSettings(told.settings),
  };
}

function readRow(row, steps) {
  if (!Array.isArray(row) || !KINDS.includes(row[1])) return null;
  const [step, kind, why, off, work] = row;
  const graded = number(off) === null ? null : within(off, 0, 1e6);
  return { step: Math.trunc(within(step, 0, steps - 1)), kind, why: text(why), off: graded, work: within(work, 0, 1) };
}

function readSettings(settings) {
  if (typeof settings !== "object" || settings === null) return {};
  const plain = Object.entries(settings).filter(([, value]) => ["number", "string", "boolean"].includes(typeof value));
  return Object.fromEntries(plain.slice(0, 40));
}

/** As it is stored with the workflow. */
export const stored = (run) => ({
  ...run,
  evaluations: run.evaluations.map(({ step, kind, why, off, work }) => [step, kind, why, off, work]),
});

/** Takes the messages of one node in their order: a run that is over takes none any more, a new one replaces it. */
export class Current {
  constructor() {
    this.run = null;
    this.over = new Set();
  }

  /** The run as it is now, or null if this message is of an earlier one. */
  take(told) {
    const run = readRun(told);
    if (!run || this.over.has(run.run)) return null;
    if (run.over) this.over.add(run.run);
    if (this.run && this.run.run !== run.run) this.over.add(this.run.run);
    return (this.run = run);
  }
}
