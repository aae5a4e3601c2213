// The rules of toma_core/plan.py that can be told before a run, restated. A test compares the two.

export const FULL = "full", MERGED = "merged", FORECAST = "forecast";
export const KINDS = [FULL, MERGED, FORECAST];
const FEW = 6; // steps of a run for each computed step that it waits, before it merges

/**
 * What each of `steps` steps will be, as {kind, why, or}. The reuse schedule (tolerance 0) is certain. With an error
 * budget only the first two steps and the last are: the others are forecast if the run allows it, else one of `or`;
 * merged only after `patience` computed steps that could not have been forecast, of fewer in a short run.
 */
export function planOf(settings, steps, family, patience = 3) {
  const { ratio, tolerance, reselect_every, reweight_every, start_percent, end_percent, merge } = settings;
  const first = Math.ceil(start_percent * steps - 1e-6), end = Math.floor(end_percent * steps + 1e-6);
  const merges = (step) => ratio > 0 && step >= first && step < end;
  if (tolerance > 0) {
    const waits = Math.min(patience, Math.floor(steps / FEW));
    return Array.from({ length: steps }, (_, step) => {
      if (step === steps - 1) return { kind: FULL, why: "lastStep" };
      if (step === 0 || (step === 1 && (waits || !merges(1)))) return { kind: FULL, why: "notKnown" };
      return { kind: FORECAST, or: merges(step) && (waits === 0 || step > waits) ? [MERGED, FULL] : [FULL] };
    });
  }
  // Tokens that ride through a whole transformer are chosen by the last answer: the first step has none.
  const rides = family === "dit" && merge === "whole block";
  let count = 0;
  return Array.from({ length: steps }, (_, step) => {
    if (!merges(step)) return { kind: FULL, why: ratio > 0 ? "outside" : "nothing" };
    if (step === 0 && rides) return { kind: FULL, why: "noAnswerYet" };
    const since = count++ % reselect_every;
    if (since === 0) return { kind: MERGED, why: "reselect" };
    return { kind: MERGED, why: since % reweight_every === 0 ? "reweight" : "reuse" };
  });
}
