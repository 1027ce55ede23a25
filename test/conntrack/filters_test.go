package conntrack_test

import (
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/conntrack"
	"github.com/nametap/nametap/internal/testkit/netns"
)

// K8: a dump has the entries that pass its filters, and no other; deleted entries are no longer in it.
func TestFilters(t *testing.T) {
	t.Parallel()
	netns.Need(t, "conntrack")
	ns := netns.New(t)
	for _, entry := range []string{ // each from a client of its own
		"-p udp -s 10.0.0.1 -d 10.0.0.53 --sport 1000 --dport 53",
		"-p udp -s 10.0.0.2 -d 10.0.0.53 --sport 1000 --dport 53 --dst-nat 127.0.0.1:15053",
		"-p udp -s 10.0.0.3 -d 10.0.0.53 --sport 1000 --dport 53 --zone 53 -u SEEN_REPLY",
		"-p udp -s 10.0.0.4 -d 10.0.0.53 --sport 1000 --dport 53 --orig-zone 53 --dst-nat 127.0.0.1:15053 -u SEEN_REPLY",
		"-p udp -s 10.0.0.5 -d 10.0.0.53 --sport 1000 --dport 53 --reply-zone 53",
		"-p udp -s 10.0.0.6 -d 10.0.0.7 --sport 53 --dport 1000 -u SEEN_REPLY,ASSURED",
		"-p tcp -s 10.0.0.8 -d 10.0.0.53 --sport 1000 --dport 53 --state SYN_SENT",
		"-p tcp -s 10.0.0.9 -d 10.0.0.53 --sport 1000 --dport 443 --state ESTABLISHED -u SEEN_REPLY,ASSURED",
	} {
		ns.Exec("conntrack", append(strings.Fields(entry), "-I", "-t", "600")...)
	}
	dump := func(family uint8, filters ...conntrack.Filter) (entries []conntrack.Entry, clients string) {
		var err error
		var found []string
		ns.Run(func() {
			err = conntrack.Dump(family, func(e conntrack.Entry) {
				entries, found = append(entries, e), append(found, strings.TrimPrefix(e.Original.Source.Addr().String(), "10.0.0."))
			}, filters...)
		})
		if err != nil {
			t.Error(err)
		}
		slices.Sort(found)
		return entries, strings.Join(found, " ")
	}
	queries := conntrack.Filter{Protocol: unix.IPPROTO_UDP, DestinationPort: 53}
	for name, test := range map[string]struct {
		filter conntrack.Filter
		want   string
	}{
		"all":              {conntrack.Filter{}, "1 2 3 4 5 6 8 9"},
		"protocol":         {conntrack.Filter{Protocol: unix.IPPROTO_TCP}, "8 9"},
		"destination port": {queries, "1 2 3 4 5"},
		"source port":      {conntrack.Filter{Protocol: unix.IPPROTO_UDP, SourcePort: 53}, "6"},
		"port alone":       {conntrack.Filter{SourcePort: 53}, "6"},
		"no reply":         {conntrack.Filter{Unreplied: true}, "1 2 5 8"},
		"TCP, no reply":    {conntrack.Filter{Protocol: unix.IPPROTO_TCP, Unreplied: true}, "8"},
		"everything":       {conntrack.Filter{Protocol: unix.IPPROTO_UDP, SourcePort: 1000, DestinationPort: 53, Unreplied: true}, "1 2 5"},
	} {
		// Without a family the kernel refuses ports, so Dump filters alone.
		for _, family := range []uint8{unix.AF_INET, unix.AF_UNSPEC} {
			if _, clients := dump(family, test.filter); clients != test.want {
				t.Errorf("%s, family %d: clients %s, want %s", name, family, clients, test.want)
			}
		}
	}
	var deleted int
	var err error
	matched, _ := dump(unix.AF_INET, queries)
	ns.Run(func() { deleted, err = conntrack.Delete(unix.AF_INET, append(matched, matched[0])) })
	if _, left := dump(unix.AF_INET, conntrack.Filter{}); deleted != 5 || err != nil || left != "6 8 9" {
		t.Errorf("deleted %d, %v; clients %s are left, want 6 8 9", deleted, err, left)
	}
}
