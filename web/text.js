// The page's own words. Names and tooltips of nodes are in locales/.
import { app } from "../../scripts/app.js";

const EN = {
  full: "chosen, full step",
  reselect: "chosen",
  reweight: "reweighted",
  reuse: "reused",
  leave: "left alone",
  height: "Height: share of the tokens that is computed",
  stepsOf: "{n} steps of {sampler}",
  stepsExample: "{n} steps as an example: no sampler is connected",
  shownFor: "values for {family}; the model is not known here",
  step: "step {s} of {n}: {what}",
  live: "step {s} · {group} · {k} of {total} tokens kept",
  noPicks: "Run the workflow: the kept tokens appear here.",
  unmerged: "No tokens were merged in this run.",
  chosenAt: "step {s} of {n} · chosen at step {at}",
  notYet: "step {s} of {n} · not merged yet",
  left: "step {s} of {n} · left alone, last chosen at step {at}",
  counted: "{k} of {total} tokens kept ({share} %)",
  stepLabel: "Step",
  blocksLabel: "Blocks",
  pictureLabel: "Picture",
  density: "tokens per kept token",
  off: "nothing is merged with these settings",
};
const KO = {
  full: "선택, 전체 계산",
  reselect: "선택",
  reweight: "가중치 갱신",
  reuse: "재사용",
  leave: "그대로 둠",
  height: "높이: 계산되는 토큰의 비율",
  stepsOf: "{sampler}의 {n}스텝",
  stepsExample: "예시로 {n}스텝: 연결된 샘플러 없음",
  shownFor: "{family} 기준 값입니다. 여기서는 모델을 알 수 없습니다",
  step: "{n}스텝 중 {s}: {what}",
  live: "스텝 {s} · {group} · 토큰 {total}개 중 {k}개 유지",
  noPicks: "워크플로를 실행하면 유지된 토큰이 여기에 나타납니다.",
  unmerged: "이 실행에서는 병합된 토큰이 없습니다.",
  chosenAt: "{n}스텝 중 {s} · {at}스텝에서 선택됨",
  notYet: "{n}스텝 중 {s} · 아직 병합 안 됨",
  left: "{n}스텝 중 {s} · 그대로 둠, 마지막 선택은 {at}스텝",
  counted: "토큰 {total}개 중 {k}개 유지 ({share} %)",
  stepLabel: "스텝",
  blocksLabel: "블록",
  pictureLabel: "그림",
  density: "토큰(남은 하나당)",
  off: "이 설정에서는 아무것도 병합되지 않습니다",
};
const ZH = {
  full: "选取，完整计算",
  reselect: "选取",
  reweight: "更新权重",
  reuse: "复用",
  leave: "不处理",
  height: "高度：参与计算的令牌比例",
  stepsOf: "{sampler} 的 {n} 步",
  stepsExample: "以 {n} 步为例：未连接采样器",
  shownFor: "按 {family} 显示；此处无法得知模型",
  step: "第 {s}/{n} 步：{what}",
  live: "第 {s} 步 · {group} · 保留 {total} 个令牌中的 {k} 个",
  noPicks: "运行工作流后，保留的令牌会显示在这里。",
  unmerged: "这次运行没有合并令牌。",
  chosenAt: "第 {s}/{n} 步 · 于第 {at} 步选取",
  notYet: "第 {s}/{n} 步 · 尚未合并",
  left: "第 {s}/{n} 步 · 不处理，最近于第 {at} 步选取",
  counted: "保留 {total} 个令牌中的 {k} 个（{share} %）",
  stepLabel: "步",
  blocksLabel: "块",
  pictureLabel: "图片",
  density: "个令牌（每个保留的令牌）",
  off: "这些设置不会合并任何内容",
};

/** The text `key` in the page's language, with its {fields} filled in. */
export function say(key, fields = {}) {
  const locale = app.extensionManager?.setting?.get("Comfy.Locale") ?? "en";
  const words = { ko: KO, zh: ZH, "zh-TW": ZH }[locale] ?? EN;
  return words[key].replace(/\{(\w+)\}/g, (_, name) => fields[name] ?? "");
}
