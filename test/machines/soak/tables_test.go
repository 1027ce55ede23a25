package soak

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/test/machines/lab/load"
)

const (
	// hosts is the number of hosts in the table.
	hosts = 1000
	// generations is the number of generations that an address can tell apart.
	generations = 1 << 13
)

// address returns the address of a host in a generation.
func address(host, generation int) netip.Addr {
	n := host<<13 | generation%generations
	return netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)})
}

// Tables writes generations of the table and checks answers against them. Its methods are
// safe for concurrent use.
type tables struct {
	dir string // from which the control plane reads

	mu       sync.Mutex
	seen     []time.Time // by generation: when its first answer came; zero before
	restarts []time.Time // of the agent, which then begins with the table of its snapshot
}

// push writes the next generation, and returns its number.
func (t *tables) push() (generation int, err error) {
	t.mu.Lock()
	generation = len(t.seen)
	t.seen = append(t.seen, time.Time{})
	t.mu.Unlock()
	var b bytes.Buffer
	for host := range hosts {
		fmt.Fprintf(&b, `{"apiVersion":"v1","kind":"Service","metadata":{"name":"h%d","namespace":"soak"},"spec":{"clusterIP":%q,"ports":[{"port":80}]}}`+"\n---\n",
			host, address(host, generation))
	}
	path := t.dir + ".next"
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		return 0, err
	}
	return generation, os.Rename(path, filepath.Join(t.dir, "services.yaml"))
}

// restarted notes that the agent ends.
func (t *tables) restarted() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.restarts = append(t.restarts, time.Now())
}

// newest returns the newest generation of which an answer came.
func (t *tables) newest() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	for generation, seen := range slices.Backward(t.seen) {
		if !seen.IsZero() {
			return generation
		}
	}
	return -1
}

// questions returns the questions about mesh names.
func (t *tables) questions() (all []load.Question) {
	for host := range hosts {
		name := "h" + strconv.Itoa(host)
		all = append(all, load.Question{Name: name + ".soak.svc.cluster.local", Check: t.check})
		if host%4 == 0 {
			all = append(all, load.Question{Name: name, Check: t.check}, load.Question{Name: name + "." + searchDomain, Check: t.check})
		}
	}
	return all
}

// check checks the answer for a mesh name: it is not from an earlier generation than one that was received before its query,
// unless the agent has restarted since.
func (t *tables) check(a load.Answer) error {
	label, _, _ := strings.Cut(a.Name, ".")
	asked, err := strconv.Atoi(label[1:])
	if err != nil {
		return err
	}
	if a.Rcode != dns.RcodeSuccess || len(a.Addresses) != 1 || !a.Addresses[0].Is4() || a.Addresses[0].As4()[0] != 10 {
		return errors.New("want one address of the table")
	}
	b := a.Addresses[0].As4()
	n := int(b[1])<<16 | int(b[2])<<8 | int(b[3])
	host, generation := n>>13, n%generations
	t.mu.Lock()
	defer t.mu.Unlock()
	if host != asked || generation >= len(t.seen) {
		return fmt.Errorf("the address is that of h%d in generation %d", host, generation)
	}
	if t.seen[generation].IsZero() {
		t.seen[generation] = a.Received
	}
	for later := generation + 1; later < len(t.seen); later++ {
		seen := t.seen[later]
		if seen.IsZero() || !seen.Before(a.Sent) {
			continue
		}
		if !slices.ContainsFunc(t.restarts, func(at time.Time) bool { return at.After(seen.Add(-time.Second)) && at.Before(a.Received) }) {
			return fmt.Errorf("generation %d, after an answer of %d", generation, later)
		}
	}
	return nil
}
