package inject

import (
	"slices"
	"strings"
)

// merge makes in the text raw the changes that turn the text base into the text next. The texts raw and base have the
// same content, but may have it in other forms: raw is the user's text, and base is what the YAML library makes of it.
// In the result, all that does not change has the form of raw, with its blank lines. merge reports false if a change
// replaces or removes lines that differ between raw and base in more than blank lines. It also reports false if the
// texts differ in too many lines.
func merge(raw, base, next string) (string, bool) {
	rawLines, baseLines, nextLines := lines(raw), lines(base), lines(next)
	inRaw, ok := match(baseLines, rawLines)
	if !ok {
		return "", false
	}
	inNext, ok := match(baseLines, nextLines)
	if !ok {
		return "", false
	}
	var out []string
	b, r, n := 0, 0, 0
	for i := range len(baseLines) + 1 {
		// A part ends at a line that all three texts have, or at the end.
		untilRaw, untilNext := len(rawLines), len(nextLines)
		if i < len(baseLines) {
			if inRaw[i] < 0 || inNext[i] < 0 {
				continue
			}
			untilRaw, untilNext = inRaw[i], inNext[i]
		}
		part, ok := choose(rawLines[r:untilRaw], baseLines[b:i], nextLines[n:untilNext])
		if !ok {
			return "", false
		}
		out = append(out, part...)
		if i < len(baseLines) {
			out = append(out, baseLines[i])
		}
		b, r, n = i+1, untilRaw+1, untilNext+1
	}
	return strings.Join(out, ""), true
}

// choose returns the merged lines of a part that differs between raw and base, between base and next, or both.
func choose(raw, base, next []string) ([]string, bool) {
	switch {
	case len(next) >= len(base) && slices.Equal(next[:len(base)], base):
		return slices.Concat(raw, next[len(base):]), true
	case len(next) >= len(base) && slices.Equal(next[len(next)-len(base):], base):
		return slices.Concat(next[:len(next)-len(base)], raw), true
	case slices.Equal(withoutBlank(raw), base):
		blank := 0
		for blank < len(raw) && strings.TrimSpace(raw[blank]) == "" {
			blank++
		}
		return append(slices.Clone(raw[:blank]), next...), true
	}
	return nil, false
}

// withoutBlank returns the lines that are not blank.
func withoutBlank(lines []string) []string {
	return slices.DeleteFunc(slices.Clone(lines), func(line string) bool { return strings.TrimSpace(line) == "" })
}

// lines returns the lines of a text, each with its end.
func lines(text string) []string { return slices.Collect(strings.Lines(text)) }

// maxDifferences is the number of lines in which texts may differ. It bounds the memory of match to
// 64 MiB, and is enough for twenty pods in one document.
const maxDifferences = 4000

// match returns the index in b for each line of a, -1 for a line that b does not have. It finds the
// shortest list of insertions and deletions (Myers, "An O(ND) Difference Algorithm", 1986), and
// reports false if that list is too long.
func match(a, b []string) ([]int, bool) {
	limit := min(maxDifferences, len(a)+len(b))
	middle := limit + 1
	reached := make([]int32, 2*middle+1) // reached[k] is the largest x on diagonal k, where k = x - y + middle
	var trace [][]int32                  // the values of reached for each number of differences
	for d := range limit + 1 {
		for k := middle - d; k <= middle+d; k += 2 {
			x := int(reached[k+1]) // a line of b that a does not have
			if k != middle-d && (k == middle+d || reached[k-1] >= reached[k+1]) {
				x = int(reached[k-1]) + 1 // a line of a that b does not have
			}
			for x < len(a) && x-k+middle < len(b) && a[x] == b[x-k+middle] {
				x++
			}
			reached[k] = int32(x) //nolint:gosec // the number of a line
			if x >= len(a) && x-k+middle >= len(b) {
				return backtrack(trace, len(a), len(b)), true
			}
		}
		trace = append(trace, slices.Clone(reached[middle-d:middle+d+1]))
	}
	return nil, false
}

// backtrack returns the matches on the path to the ends of both texts.
func backtrack(trace [][]int32, x, y int) []int {
	places := slices.Repeat([]int{-1}, x)
	for d := len(trace); d >= 0; d-- {
		fromX, fromY := 0, 0
		if d > 0 {
			before := trace[d-1] // the value of diagonal k has the index k + d - 1
			at := func(k int) int32 {
				if i := k + d - 1; i >= 0 && i < len(before) {
					return before[i]
				}
				return -1
			}
			k := x - y
			if k == -d || k != d && at(k-1) < at(k+1) {
				k++
			} else {
				k--
			}
			fromX = int(at(k))
			fromY = fromX - k
		}
		for x > fromX && y > fromY {
			x, y = x-1, y-1
			places[x] = y
		}
		x, y = fromX, fromY
	}
	return places
}
