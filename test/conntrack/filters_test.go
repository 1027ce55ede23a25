package conntrack_test

import (
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/conntrack"
	"github.com/nametap/nametap/internal/testkit/netns"
)

// K8: a list has the entries that match, and no other; deleted entries are no longer in it.
func TestList(t *testing.T) {
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
	list := func(match func(conntrack.Entry) bool) (entries []conntrack.Entry, clients string) {
		var err error
		ns.Run(func() { entries, err = conntrack.List(unix.AF_INET, match) })
		if err != nil {
			t.Error(err)
		}
		var found []string
		for _, e := range entries {
			found = append(found, strings.TrimPrefix(e.Original.Source.Addr().String(), "10.0.0."))
		}
		slices.Sort(found)
		return entries, strings.Join(found, " ")
	}
	of := func(protocol uint8) func(conntrack.Entry) bool {
		return func(e conntrack.Entry) bool { return e.Original.Protocol == protocol }
	}
	for name, test := range map[string]struct {
		match func(conntrack.Entry) bool
		want  string
	}{
		"all":      {func(conntrack.Entry) bool { return true }, "1 2 3 4 5 6 8 9"},
		"protocol": {of(unix.IPPROTO_TCP), "8 9"},
		"port":     {func(e conntrack.Entry) bool { return e.Original.Source.Port() == 53 }, "6"},
		"no reply": {func(e conntrack.Entry) bool { return !e.Replied }, "1 2 5 8"},
		"zone":     {func(e conntrack.Entry) bool { return e.Zone == 53 }, "3 4"},
		"ended":    {func(e conntrack.Entry) bool { return e.TCP == conntrack.TCPSynSent }, "8"},
	} {
		if _, clients := list(test.match); clients != test.want {
			t.Errorf("%s: clients %s, want %s", name, clients, test.want)
		}
	}
	var deleted int
	var err error
	matched, _ := list(func(e conntrack.Entry) bool { return e.Original.Destination.Port() == 53 && of(unix.IPPROTO_UDP)(e) })
	ns.Run(func() { deleted, err = conntrack.Delete(unix.AF_INET, append(matched, matched[0])) })
	if _, left := list(func(conntrack.Entry) bool { return true }); deleted != 5 || err != nil || left != "6 8 9" {
		t.Errorf("deleted %d, %v; clients %s are left, want 6 8 9", deleted, err, left)
	}
}
