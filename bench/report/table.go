package report

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// A Table is rows of cells below a header. The first column is text, the others
// are numbers.
type Table struct {
	Title  string
	Header []string
	Rows   [][]string
}

// Text returns the table as Markdown, with aligned columns.
func (t Table) Text() string {
	lines := slices.Concat([][]string{t.Header, make([]string, len(t.Header))}, t.Rows)
	for i := range t.Header {
		width := 0
		for _, cells := range lines {
			width = max(width, utf8.RuneCountInString(cells[i]))
		}
		for k, cells := range lines {
			fill := strings.Repeat(" ", width-utf8.RuneCountInString(cells[i]))
			switch {
			case k == 1 && i == 0:
				cells[i] = strings.Repeat("-", width)
			case k == 1:
				cells[i] = strings.Repeat("-", width-1) + ":"
			case i == 0:
				cells[i] += fill
			default:
				cells[i] = fill + cells[i]
			}
		}
	}
	var b strings.Builder
	b.WriteString(t.Title + "\n\n")
	for _, cells := range lines {
		b.WriteString("| " + strings.Join(cells, " | ") + " |\n")
	}
	return b.String() + "\n"
}

// Cell formats a number with its significant digits, and NaN as a dash.
func Cell(v float64) string {
	switch {
	case math.IsNaN(v):
		return "–"
	case math.Abs(v) < 10:
		return fmt.Sprintf("%.2f", v)
	case math.Abs(v) < 100:
		return fmt.Sprintf("%.1f", v)
	}
	return Thousands(int(math.Round(v)))
}

// Thousands writes n with commas.
func Thousands(n int) string {
	if n < 0 {
		return "-" + Thousands(-n)
	}
	if n < 1000 {
		return strconv.Itoa(n)
	}
	return fmt.Sprintf("%s,%03d", Thousands(n/1000), n%1000)
}
