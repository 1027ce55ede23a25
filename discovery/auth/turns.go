package auth

import (
	"context"
	"fmt"
	"sync"
	"time"
)

const (
	// maxReviews bounds the reviews in flight, maxReviewsOfOne the reviews in flight of one
	// address.
	maxReviews, maxReviewsOfOne = 32, 4
	// maxWaiting bounds the reviews that wait or are in flight, maxWaitingOfOne those of one address.
	maxWaiting, maxWaitingOfOne = 4000, 250
	// maxTurnWait bounds how long a review waits.
	maxTurnWait = 5 * time.Second
)

// turns bounds the reviews in flight. A token that is not known may be made up, so each address gets equally many
// turns: at most maxReviewsOfOne of its reviews are at the API server at a time. An address's reviews are served in the
// order in which they came.
type turns struct {
	all chan struct{} // has an element for each review in flight

	mu      sync.Mutex
	waiting int // number of reviews that wait or are in flight, in all lanes
	lanes   map[string]*lane
}

// A lane has the reviews of one address, or of one service account whose token was good.
type lane struct {
	waiting int           // number of reviews that wait or are in flight
	turn    chan struct{} // has an element for each review that is in flight, or that waits for other lanes only
}

func newTurns() *turns {
	return &turns{all: make(chan struct{}, maxReviews), lanes: map[string]*lane{}}
}

// take waits until a review of an address, or of a service account, may begin. After the review, the caller must call
// the function done.
func (t *turns) take(ctx context.Context, address string) (done func(), err error) {
	l := t.enter(address)
	if l == nil {
		return nil, fmt.Errorf("%w: too many tokens of %s wait for that", ErrUnavailable, address)
	}
	ctx, cancel := context.WithTimeout(ctx, maxTurnWait)
	defer cancel()
	select {
	case l.turn <- struct{}{}:
	case <-ctx.Done():
		t.leave(address)
		return nil, fmt.Errorf("%w: other tokens of %s were before it for %v", ErrUnavailable, address, maxTurnWait)
	}
	leave := func() {
		<-l.turn
		t.leave(address)
	}
	select {
	case t.all <- struct{}{}:
	case <-ctx.Done():
		leave()
		return nil, fmt.Errorf("%w: other tokens were before it for %v", ErrUnavailable, maxTurnWait)
	}
	return func() {
		<-t.all
		leave()
	}, nil
}

// enter adds a review to the lane of an address, and returns the lane, or nil if there are too many reviews. If there
// are too many in all lanes together, an address without a review may still have one.
func (t *turns) enter(address string) *lane {
	t.mu.Lock()
	defer t.mu.Unlock()
	l := t.lanes[address]
	if l == nil {
		l = &lane{turn: make(chan struct{}, maxReviewsOfOne)}
		t.lanes[address] = l
	}
	if l.waiting >= maxWaitingOfOne || t.waiting >= maxWaiting && l.waiting > 0 {
		return nil
	}
	l.waiting++
	t.waiting++
	return l
}

// leave ends a review of an address.
func (t *turns) leave(address string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.waiting--
	l := t.lanes[address]
	if l.waiting--; l.waiting == 0 {
		delete(t.lanes, address)
	}
}
