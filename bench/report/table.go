package report

import (
	"encoding/json"
	"fmt"
	"math"
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

// MarshalJSON writes the cells as text.
func (t Table) MarshalJSON() ([]byte, error) {
	return json.Marshal(map[string]any{"title": t.Title, "header": t.Header, "rows": t.Rows})
}

// Text aligns the columns with spaces.
func (t Table) Text() string {
	widths := make([]int, len(t.Header))
	lines := append([][]string{t.Header}, t.Rows...)
	for _, cells := range lines {
		for i, cell := range cells {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	var b strings.Builder
	b.WriteString(t.Title + "\n\n")
	for _, cells := range lines {
		var line strings.Builder
		for i, cell := range cells {
			fill := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell))
			if i == 0 {
				line.WriteString("  " + cell + fill)
			} else {
				line.WriteString("  " + fill + cell)
			}
		}
		b.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	return b.String() + "\n"
}

// Markdown returns the table as Markdown.
func (t Table) Markdown() string {
	row := func(cells []string) string {
		escaped := make([]string, len(cells))
		for i, cell := range cells {
			escaped[i] = strings.ReplaceAll(cell, "|", `\|`)
		}
		return "| " + strings.Join(escaped, " | ") + " |\n"
	}
	var b strings.Builder
	b.WriteString(t.Title + "\n\n" + row(t.Header))
	b.WriteString("|---|" + strings.Repeat("---:|", len(t.Header)-1) + "\n")
	for _, cells := range t.Rows {
		b.WriteString(row(cells))
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
