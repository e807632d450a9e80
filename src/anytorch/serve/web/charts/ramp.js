// A colour ramp whose lightness only rises or only falls, so that it reads the same for every kind of colour vision and
// in print. The stops are of our own choosing; light pages end dark, dark pages end bright. Pure.

const STOPS = {
  light: [
    [247, 249, 246],
    [205, 230, 222],
    [124, 190, 183],
    [44, 138, 146],
    [18, 84, 112],
    [13, 38, 74],
  ],
  dark: [
    [22, 29, 33],
    [19, 57, 76],
    [22, 98, 116],
    [46, 146, 138],
    [132, 198, 150],
    [243, 240, 178],
  ],
};

/** [red, green, blue] of a share from 0 to 1. */
export function ramp(share, theme) {
  const stops = STOPS[theme];
  const place = Math.max(0, Math.min(1, Number.isFinite(share) ? share : 0)) * (stops.length - 1);
  const at = Math.min(stops.length - 2, Math.floor(place));
  return stops[at].map((from, channel) => Math.round(from + (stops[at + 1][channel] - from) * (place - at)));
}

export const css = ([red, green, blue]) => `rgb(${red} ${green} ${blue})`;

/** The relative luminance of WCAG 2; text on a cell is dark or light by it. */
export function luminance(rgb) {
  const [r, g, b] = rgb.map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
