package netns

import (
	"regexp"
	"strings"
)

// changing matches the parts of the output of iptables-save that change although the
// rules do not change: comments with the time, and counters of packets and bytes.
var changing = regexp.MustCompile(`(?m)^#.*\n| \[\d+:\d+\]$`)

// Rules returns the rules of both backends of iptables and of both families, as
// iptables-save prints them, without times and counters. Two results are equal if the
// rules are equal.
func (n *NS) Rules() string {
	n.tb.Helper()
	var rules strings.Builder
	for _, tool := range []string{"iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy"} {
		rules.WriteString("== " + tool + "\n")
		rules.WriteString(changing.ReplaceAllString(n.Exec(tool+"-save"), ""))
	}
	return rules.String()
}
