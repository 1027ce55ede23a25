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

	"github.com/nametap/nametap/test/machines/load"
)

const (
	// hosts is the number of hosts in the table.
	hosts = 10_000
	// generations is the number of generations that an address can tell apart.
	generations = 1 << 10
	// staleAfter is how long after the write of a new generation the previous one is right:
	// while it is read, pushed and put into use, on a busy machine.
	staleAfter = 10 * time.Second
)

// address returns the address of a host in a generation.
func address(host, generation int) netip.Addr {
	n := host<<10 | generation%generations
	return netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)})
}

// decode returns the host of an address, and the last ten bits of its generation.
func decode(addr netip.Addr) (host, generation int, err error) {
	b := addr.As4()
	if !addr.Is4() || b[0] != 10 {
		return 0, 0, fmt.Errorf("%v is not in any table", addr)
	}
	n := int(b[1])<<16 | int(b[2])<<8 | int(b[3])
	return n >> 10, n % generations, nil
}

// Tables writes generations of the table and checks answers against them. Its methods are
// safe for concurrent use.
type tables struct {
	dir string // from which the control plane reads

	mu       sync.Mutex
	begun    []time.Time // by generation: when its write began
	seen     []time.Time // by generation: when its first answer came; zero before
	frozen   []span      // when the agent's table may be older than usual
	restarts []time.Time // of the agent
	lags     lags
}

// A span is a time. One that has no end yet has until zero.
type span struct{ from, until time.Time }

func (s span) contains(t time.Time) bool {
	return !t.Before(s.from) && (s.until.IsZero() || t.Before(s.until))
}

// lags are figures of how old the tables of answers were.
type lags struct {
	usual, frozen time.Duration // the longest times since the next generation was written
	back          int           // the most generations that a restart went back
}

// push writes the next generation.
func (t *tables) push() error {
	t.mu.Lock()
	generation := len(t.begun)
	t.mu.Unlock()
	var b bytes.Buffer
	b.WriteString(`{"apiVersion":"v1","kind":"List","items":[`)
	for host := range hosts {
		if host > 0 {
			b.WriteString(",\n")
		}
		fmt.Fprintf(&b, `{"apiVersion":"v1","kind":"Service","metadata":{"name":"h%d","namespace":"soak"},"spec":{"clusterIP":%q,"ports":[{"port":80}]}}`,
			host, address(host, generation))
	}
	b.WriteString("]}\n")
	path := t.dir + ".next"
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		return err
	}
	t.mu.Lock()
	t.begun, t.seen = append(t.begun, time.Now()), append(t.seen, time.Time{})
	t.mu.Unlock()
	return os.Rename(path, filepath.Join(t.dir, "services.yaml"))
}

// freeze notes that the agent's table may be older than usual, until the returned function
// is called, and some time longer: the agent backs off for up to 30 s (C5).
func (t *tables) freeze() (thaw func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	began := time.Now()
	t.frozen = append(t.frozen, span{from: began})
	at := len(t.frozen) - 1
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.frozen[at].until = time.Now().Add(30*time.Second + staleAfter)
	}
}

// restarted notes that the agent ends: the next one begins with the table of its snapshot.
func (t *tables) restarted() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.restarts = append(t.restarts, time.Now())
}

// questions returns the questions about mesh names.
func (t *tables) questions() []load.Question {
	var questions []load.Question
	for host := range hosts {
		name := "h" + strconv.Itoa(host)
		questions = append(questions, load.Question{Name: name + ".soak.svc.cluster.local", Check: t.check})
		switch host / 1000 {
		case 0:
			questions = append(questions, load.Question{Name: name, Check: t.check})
		case 1:
			questions = append(questions, load.Question{Name: name + "." + searchDomain, Check: t.check})
		case 2:
			questions = append(questions, load.Question{Name: name + ".soak.svc.cluster.local", Type: "AAAA", Check: noAddresses})
		}
	}
	return questions
}

// noAddresses checks an answer without records.
func noAddresses(a load.Answer) error {
	if a.Rcode != dns.RcodeSuccess || len(a.Addresses) > 0 {
		return errors.New("want no addresses")
	}
	return nil
}

// check checks the answer for a mesh name.
func (t *tables) check(a load.Answer) error {
	label, _, _ := strings.Cut(a.Name, ".")
	asked, err := strconv.Atoi(label[1:])
	if err != nil {
		return err
	}
	if a.Rcode != dns.RcodeSuccess || len(a.Addresses) != 1 {
		return errors.New("want one address")
	}
	host, bits, err := decode(a.Addresses[0])
	if err != nil {
		return err
	}
	if host != asked {
		return fmt.Errorf("the address is that of h%d", host)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	latest := len(t.begun) - 1
	generation := latest - (latest-bits+generations)%generations
	if generation < 0 {
		return fmt.Errorf("generation %d does not exist yet", bits)
	}
	if t.seen[generation].IsZero() {
		t.seen[generation] = a.Received
	}
	if err := t.orderedLocked(a, generation); err != nil {
		return err
	}
	return t.recentLocked(a, generation)
}

// orderedLocked returns an error if an answer is from an earlier generation than one that
// was received before its query, unless the agent has restarted since.
func (t *tables) orderedLocked(a load.Answer, generation int) error {
	for later := len(t.seen) - 1; later > generation; later-- {
		seen := t.seen[later]
		if seen.IsZero() || !seen.Before(a.Sent) {
			continue
		}
		if slices.ContainsFunc(t.restarts, func(at time.Time) bool { return at.After(seen.Add(-time.Second)) && at.Before(a.Received) }) {
			t.lags.back = max(t.lags.back, later-generation)
			return nil
		}
		return fmt.Errorf("generation %d, after an answer of %d at %s", generation, later, seen.Format(timeFormat))
	}
	return nil
}

// recentLocked returns an error if an answer is from a generation that was replaced too long
// before its query.
func (t *tables) recentLocked(a load.Answer, generation int) error {
	if generation == len(t.begun)-1 {
		return nil
	}
	lag := a.Sent.Sub(t.begun[generation+1])
	allowed, frozen := staleAfter, false
	for _, f := range t.frozen {
		if f.contains(a.Sent) {
			frozen = true
			allowed = max(allowed, a.Sent.Sub(f.from)+staleAfter)
		}
	}
	if frozen {
		t.lags.frozen = max(t.lags.frozen, lag)
	} else {
		t.lags.usual = max(t.lags.usual, lag)
	}
	if lag > allowed {
		return fmt.Errorf("generation %d, replaced %v before the query", generation, lag)
	}
	return nil
}

// timeFormat is the format of times.
const timeFormat = "15:04:05.000"
