// The rule of toma_core/schedule.py and Settings.schedule, restated. A test compares the two.

export const LEAVE = "leave", RESELECT = "reselect", REWEIGHT = "reweight", REUSE = "reuse";

/** What each of `steps` steps does. */
export function table({ reselect_every, reweight_every, start_percent, end_percent }, steps) {
  const first = Math.ceil(start_percent * steps - 1e-6);
  const end = Math.floor(end_percent * steps + 1e-6);
  return Array.from({ length: steps }, (_, step) => {
    if (step < first || step >= end) return LEAVE;
    const since = (step - first) % reselect_every;
    if (since === 0) return RESELECT;
    return since % reweight_every === 0 ? REWEIGHT : REUSE;
  });
}

/** Whether steps that choose run unmerged, their detail carried through the steps after them. */
export const carries = (settings) =>
  settings.carry_detail && settings.reselect_every > 1 && settings.merge === "whole block";

/** The schedule that these settings ask for. */
export const scheduleOf = (settings) =>
  carries(settings) ? { ...settings, reweight_every: settings.reselect_every } : settings;
