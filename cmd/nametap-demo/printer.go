package main

import (
	"fmt"
	"io"
	"os"
)

// A printer writes text with bold and dim parts on a terminal, and plain text to other
// outputs or if NO_COLOR is set.
type printer struct {
	w       io.Writer
	styled  bool
	section int
}

func newPrinter(w io.Writer) *printer {
	p := &printer{w: w}
	if file, ok := w.(*os.File); ok && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb" {
		info, err := file.Stat()
		p.styled = err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	return p
}

// printf prints. It ignores errors: the terminal or the reading program may have ended.
func (p *printer) printf(format string, args ...any) { _, _ = fmt.Fprintf(p.w, format, args...) }

// heading prints the numbered heading of the next section.
func (p *printer) heading(text string) {
	p.section++
	p.printf("\n%s\n", p.bold(fmt.Sprintf("%d. %s", p.section, text)))
}

// detail prints dim text after indent spaces.
func (p *printer) detail(indent int, text string) { p.printf("%*s%s\n", indent, "", p.dim(text)) }

// leftOut prints why this machine cannot show something.
func (p *printer) leftOut(reason string) { p.detail(2, "left out on this machine: "+reason) }

func (p *printer) bold(s string) string { return p.style("1", s) }
func (p *printer) dim(s string) string  { return p.style("2", s) }

func (p *printer) style(code, s string) string {
	if !p.styled {
		return s
	}
	return "\x1b[" + code + "m" + s + "\x1b[0m"
}
