package inject

import (
	"math"
	"strings"

	"go.yaml.in/yaml/v3"
)

// A splicer writes the lines of a YAML document, with new lines where its tree has changed.
type splicer struct {
	old     map[*yaml.Node][]*yaml.Node // of the change
	lines   []string                    // each with its end
	written int                         // the number of lines that are written, or left out
	out     strings.Builder
}

// to writes the lines before a line.
func (s *splicer) to(line int) {
	for ; s.written < line; s.written++ {
		s.out.WriteString(s.lines[s.written])
	}
}

// collection writes the lines of a changed mapping or sequence, which end before the line end. It reports false if it
// cannot.
func (s *splicer) collection(n *yaml.Node, end int) bool {
	old, size := s.old[n], itemSize(n)
	begins, indent, ok := s.begins(n)
	if !ok {
		return false
	}
	begins = append(begins, end)
	places, next := map[*yaml.Node]int{}, 0 // the places of items in n.Content; the next one
	for i := 0; i < len(n.Content); i += size {
		places[n.Content[i]] = i
	}
	for i := 0; i < len(old); i += size {
		begin, limit := begins[i/size], begins[i/size+1]
		stop := s.trimmed(begin+1, limit, indent)
		place, stays := places[old[i]]
		if !stays {
			s.to(begin)
			s.written = stop
			continue
		}
		if place > next {
			s.to(s.comments(begin, indent))
			s.write(n.Kind, n.Content[next:place], strings.Repeat(" ", indent), indent)
		}
		next = place + size
		v := old[i+size-1]
		if _, changed := s.old[v]; changed && !s.collection(v, limit) {
			s.to(begin)
			if s.written = s.trimmed(begin+1, limit, math.MaxInt); s.written > begin+1 { // else only comments follow: they stay
				s.written = stop
			}
			s.write(n.Kind, withoutOuter(old[i:i+size]), s.lines[begin][:indent], indent)
		}
	}
	s.to(s.trimmed(begins[len(begins)-2]+1, end, indent))
	if next < len(n.Content) {
		s.write(n.Kind, n.Content[next:], strings.Repeat(" ", indent), indent)
	}
	return true
}

// itemSize returns the number of nodes of an item of a collection: a key and its value, or an element.
func itemSize(n *yaml.Node) int {
	if n.Kind == yaml.MappingNode {
		return 2
	}
	return 1
}

// begins returns the lines on which the items of a changed mapping or sequence begin, and their column. It reports false
// unless they begin on lines of their own, in one column. The first item may follow the dash of a list in which it is.
func (s *splicer) begins(n *yaml.Node) (lines []int, indent int, ok bool) {
	old := s.old[n]
	if n.Style&yaml.FlowStyle != 0 || len(old) == 0 || len(n.Content) == 0 {
		return nil, 0, false
	}
	indent = s.indent(n, old[0])
	for i := 0; i < len(old); i += itemSize(n) {
		line, column := old[i].Line-1, s.indent(n, old[i])
		if column != indent || column < 0 || i > 0 && line <= lines[len(lines)-1] {
			return nil, 0, false
		}
		alone := strings.TrimSpace(s.lines[line][:column]) == ""
		if !alone && (i > 0 || old[0] != n.Content[0]) {
			return nil, 0, false
		}
		lines = append(lines, line)
	}
	return lines, indent, true
}

// indent returns the column of an item of a mapping or a sequence, counted from 0; -1 if the item is not the first on its line
// but for dashes.
func (s *splicer) indent(n, item *yaml.Node) int {
	line, column := item.Line-1, item.Column-1
	if line < 0 || line >= len(s.lines) || column < 0 || column > len(s.lines[line]) {
		return -1
	}
	before := s.lines[line][:column]
	if strings.Trim(before, " -") != "" {
		return -1
	}
	if n.Kind == yaml.SequenceNode {
		return len(strings.TrimRight(before, " ")) - 1
	}
	return column
}

// isComment reports whether a line has only a comment, and returns its column.
func isComment(line string) (column int, ok bool) {
	text := strings.TrimLeft(line, " \t")
	return len(line) - len(text), strings.HasPrefix(text, "#")
}

// trimmed returns the end of an item that begins in a column: limit, or a line before it. Blank lines at the end, and
// comments that do not belong to the item, are left out.
func (s *splicer) trimmed(from, limit, column int) int {
	for ; limit > from; limit-- {
		if place, ok := isComment(s.lines[limit-1]); strings.TrimSpace(s.lines[limit-1]) != "" && (!ok || place > column) {
			break
		}
	}
	return limit
}

// comments returns the first line of the comments above an item.
func (s *splicer) comments(line, column int) int {
	for line > s.written {
		if place, ok := isComment(s.lines[line-1]); !ok || place != column {
			break
		}
		line--
	}
	return line
}

// write writes items of a mapping or a sequence. The first line comes after the text first, all others in a column.
func (s *splicer) write(kind yaml.Kind, items []*yaml.Node, first string, column int) {
	end := "\n"
	if strings.HasSuffix(s.lines[0], "\r\n") {
		end = "\r\n"
	}
	for line := range strings.Lines(encodeYAML(&yaml.Node{Kind: kind, Content: items})) {
		if line != "\n" {
			line = first + line
		}
		s.out.WriteString(strings.TrimSuffix(line, "\n") + end)
		first = strings.Repeat(" ", column)
	}
}

// withoutOuter returns copies of the nodes of an item without the comments above and below it.
func withoutOuter(item []*yaml.Node) []*yaml.Node {
	var copies []*yaml.Node
	for _, n := range item {
		c := *n
		c.HeadComment, c.FootComment = "", ""
		copies = append(copies, &c)
	}
	return copies
}
