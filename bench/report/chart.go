package report

import (
	"encoding/xml"
	"fmt"
	"strings"
)

// Lengths of the chart, in pixels.
const (
	chartWidth  = 760
	labelWidth  = 230
	valueWidth  = 70
	barHeight   = 20
	barDistance = 30
	chartTop    = 56
	chartBottom = 34
)

// chartStyle has the colours for light and dark pages. The background is transparent.
const chartStyle = `
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #24292f }
  .title { font-size: 15px; font-weight: 600 }
  .small { font-size: 11px; fill: #57606a }
  .bar { fill: #8c959f }
  .own { fill: #0969da }
  .strong { font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .small { fill: #9198a1 }
    .bar { fill: #6e7681 }
    .own { fill: #4493f8 }
  }
`

// A Bar is one line of the chart.
type Bar struct {
	Label string
	Value float64
	Own   bool
}

// DrawBars draws horizontal bars with their values.
func DrawBars(title, subtitle string, bars []Bar) string {
	longest := 0.0
	for _, b := range bars {
		longest = max(longest, b.Value)
	}
	height := chartTop + len(bars)*barDistance + chartBottom - barDistance
	var svg strings.Builder
	fmt.Fprintf(&svg, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %[1]d %[2]d" role="img" aria-label="%[3]s">`+"\n",
		chartWidth, height, escape(title))
	fmt.Fprintf(&svg, "<style>%s</style>\n", chartStyle)
	fmt.Fprintf(&svg, `<text class="title" x="8" y="20">%s</text>`+"\n", escape(title))
	fmt.Fprintf(&svg, `<text class="small" x="8" y="38">%s</text>`+"\n", escape(subtitle))
	for i, b := range bars {
		top := chartTop + i*barDistance
		length := b.Value / longest * (chartWidth - labelWidth - valueWidth)
		bar, text := "bar", ""
		if b.Own {
			bar, text = "own", ` class="strong"`
		}
		middle := top + barHeight/2 + 5
		fmt.Fprintf(&svg, `<text%s x="%d" y="%d" text-anchor="end">%s</text>`, text, labelWidth-10, middle, escape(b.Label))
		fmt.Fprintf(&svg, `<rect class="%s" x="%d" y="%d" width="%.1f" height="%d" rx="2"/>`, bar, labelWidth, top, length, barHeight)
		fmt.Fprintf(&svg, `<text%s x="%.1f" y="%d">%s</text>`+"\n", text, labelWidth+length+8, middle, Cell(b.Value))
	}
	svg.WriteString("</svg>\n")
	return svg.String()
}

// escape makes s safe between tags and in quotes.
func escape(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a strings.Builder takes all
	return b.String()
}
