package netns

import (
	"regexp"
	"strings"
)

// changing matches the parts of the output of iptables-save that change although the
// rules do not change: comments with the time, and counters of packets and bytes.
var changing = regexp.MustCompile(`(?m)^#.*\n| \[\d+:\d+\]$`)

// builtin matches built-in chains with their default policy, and empty matches tables that have nothing else. They stay in
// the kernel once a program has used the table.
var builtin, empty = regexp.MustCompile(`(?m)^:[A-Z]+ ACCEPT\n`), regexp.MustCompile(`(?m)^\*\w+\nCOMMIT\n`)

// Rules returns the rules of both backends of iptables and of both families, as
// iptables-save prints them, without times, counters and empty tables. Two results are equal if the
// rules are equal.
func (n *NS) Rules() string {
	n.tb.Helper()
	var rules strings.Builder
	for _, tool := range []string{"iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy"} {
		rules.WriteString("== " + tool + "\n")
		saved := changing.ReplaceAllString(n.Exec(tool+"-save"), "")
		rules.WriteString(empty.ReplaceAllString(builtin.ReplaceAllString(saved, ""), ""))
	}
	return rules.String()
}
