package intake

import (
	"net/netip"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A Group bounds what each of its members takes, for example the connections of each address. The field max is how many
// things a member may hold at a time. A member can take this many at once, and then this many again in each minute. Its
// methods are safe for concurrent use.
type Group[K comparable] struct {
	max int

	mu      sync.Mutex
	members map[K]*member
	sweep   int // number of members at which sweepLocked removes some
}

// A member has what one member of a Group holds, and what it may still take.
type member struct {
	held      int
	spare     float64   // how many things the member could take at spareTime
	spareTime time.Time // the time for which spare was computed
}

// minSweep is the least value of Group.sweep.
const minSweep = 1 << 10

// NewGroup returns a group whose members hold nothing.
func NewGroup[K comparable](limit int) *Group[K] {
	return &Group[K]{max: limit, members: map[K]*member{}, sweep: minSweep}
}

// Take takes a thing for the member with a key. It reports false if the member holds too many things already, or takes
// them too often.
func (g *Group[K]) Take(key K) bool {
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	m := g.members[key]
	if m == nil {
		g.sweepLocked(now)
		m = &member{spare: float64(g.max), spareTime: now}
		g.members[key] = m
	}
	m.fill(g.max, now)
	if m.held >= g.max || m.spare < 1 {
		return false
	}
	m.held++
	m.spare--
	return true
}

// Give gives back a thing of the member with a key.
func (g *Group[K]) Give(key K) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.members[key].held--
}

// fill adds to spare what the member may take because time has passed since the last call. The parameter limit is the
// max of the group.
func (m *member) fill(limit int, now time.Time) {
	m.spare = min(float64(limit), m.spare+now.Sub(m.spareTime).Minutes()*float64(limit))
	m.spareTime = now
}

// sweepLocked removes the members that hold nothing and may take as much as new members.
func (g *Group[K]) sweepLocked(now time.Time) {
	if len(g.members) < g.sweep {
		return
	}
	for key, m := range g.members {
		if m.fill(g.max, now); m.held == 0 && m.spare == float64(g.max) {
			delete(g.members, key)
		}
	}
	g.sweep = max(minSweep, 2*len(g.members))
}

// Places bounds the clients that are served at a time.
type Places struct {
	max, perAddress, share int
	addresses              *Group[netip.Addr]
	namespaces             *Group[string]

	mu             sync.Mutex
	open, unproven int
}

// NewPlaces returns Places for at most limit clients, with at most perAddress clients at each address. The clients of
// one namespace get at most half of the places. If other clients can prove their identity, all clients that prove
// nothing get at most half of the places together.
func NewPlaces(limit, perAddress int) *Places {
	share := max(1, limit/2)
	return &Places{
		max: limit, perAddress: perAddress, share: share,
		addresses: NewGroup[netip.Addr](perAddress), namespaces: NewGroup[string](share),
	}
}

// A Place is the place of one client.
type Place struct {
	places    *Places
	address   netip.Addr
	taken     bool   // it counts among all places
	unproven  bool   // it counts among the clients that prove nothing
	namespace string // the namespace in which it counts; empty if none
}

// Enter reserves a place for a client at an address. [Place.Prove] or [Place.Unproven] then takes it. If Enter returns
// no error, call [Place.Leave] in the end.
func (p *Places) Enter(address netip.Addr) (*Place, error) {
	if !p.addresses.Take(address) {
		return nil, status.Errorf(codes.ResourceExhausted, "%d clients at %s are served already, or as many have connected within a minute (--max-clients-per-address): "+
			"connect later", p.perAddress, address)
	}
	return &Place{places: p, address: address}, nil
}

// Prove takes the place for a client that has proven its namespace. Places are counted by namespace, because a tenant of
// a cluster has a namespace, and may have any number of service accounts in it.
func (p *Place) Prove(namespace string) error {
	if err := p.take(); err != nil {
		return err
	}
	if !p.places.namespaces.Take(namespace) {
		return status.Errorf(codes.ResourceExhausted, "%d clients of the namespace %q are served already, half of --max-clients, or as many have connected within a minute: "+
			"try another control plane, or later", p.places.share, namespace)
	}
	p.namespace = namespace
	return nil
}

// Unproven takes the place for a client that proves nothing. The parameter othersProve is true if other clients can
// prove their identity.
func (p *Place) Unproven(othersProve bool) error {
	if err := p.take(); err != nil {
		return err
	}
	p.places.mu.Lock()
	defer p.places.mu.Unlock()
	if othersProve && p.places.unproven >= p.places.share {
		return status.Errorf(codes.ResourceExhausted, "%d clients in plaintext are served already, half of --max-clients: connect over TLS, or later", p.places.share)
	}
	p.places.unproven++
	p.unproven = true
	return nil
}

// take takes one of all places.
func (p *Place) take() error {
	p.places.mu.Lock()
	defer p.places.mu.Unlock()
	if p.places.open >= p.places.max {
		return status.Errorf(codes.ResourceExhausted, "this control plane serves %d clients already (--max-clients): try another one, or later", p.places.max)
	}
	p.places.open++
	p.taken = true
	return nil
}

// Leave gives the place back.
func (p *Place) Leave() {
	p.places.addresses.Give(p.address)
	if p.namespace != "" {
		p.places.namespaces.Give(p.namespace)
	}
	p.places.mu.Lock()
	defer p.places.mu.Unlock()
	if p.unproven {
		p.places.unproven--
	}
	if p.taken {
		p.places.open--
	}
}
