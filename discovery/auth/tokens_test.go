package auth

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func token(name string, expires time.Time) string {
	payload := base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, `{"sub":%q,"exp":%d}`, name, expires.Unix()))
	return "e30." + payload + ".c2ln"
}

// D49: one review per token and five minutes. While the API server is away, an answer counts until
// its token ends.
func TestTokens(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	var reviews atomic.Int64
	var failure error // of reviews
	tokens := NewTokens(func(context.Context, string) (Identity, error) {
		reviews.Add(1)
		if failure != nil {
			return Identity{}, failure
		}
		return Identity{"shop", "web"}, nil
	})
	tokens.now = func() time.Time { return now }
	long := token("long", now.Add(time.Hour))
	ask := func(what, token string, wantErr error, wantReviews int64) {
		t.Helper()
		reviews.Store(0)
		got, err := tokens.Identity(t.Context(), token)
		if !errors.Is(err, wantErr) || err == nil && got != (Identity{"shop", "web"}) || reviews.Load() != wantReviews {
			t.Errorf("%s: %v, %v after %d reviews, want %v after %d", what, got, err, reviews.Load(), wantErr, wantReviews)
		}
	}
	ask("the first time", long, nil, 1)
	now = now.Add(reviewedFor - time.Second)
	ask("before five minutes", long, nil, 0)
	now = now.Add(2 * time.Second)
	ask("after five minutes", long, nil, 1)

	away := fmt.Errorf("connection refused: %w", ErrUnavailable)
	failure = away
	now = now.Add(reviewedFor + time.Second)
	ask("while the API server is away", long, nil, 1)
	ask("a new token meanwhile", token("new", now.Add(time.Hour)), ErrUnavailable, 1)
	now = now.Add(time.Hour)
	ask("an old answer after the end of its token", long, ErrUnavailable, 1)

	refused := errors.New("refused")
	failure = refused
	ask("refused", long, refused, 1)
	ask("refused again", long, refused, 0)
	failure = away
	now = now.Add(refusedFor + time.Second)
	ask("refused before the API server went away", long, ErrUnavailable, 1)

	failure = nil
	short := token("short", now.Add(time.Minute))
	ask("a token that ends soon", short, nil, 1)
	failure = refused
	now = now.Add(61 * time.Second)
	ask("after its end", short, refused, 1)
}

// D49: requests with one token at a time share a review, also if the first of them is given up.
func TestTokensShareReview(t *testing.T) {
	asked, released := make(chan struct{}), make(chan struct{})
	var reviews atomic.Int64
	tokens := NewTokens(func(ctx context.Context, _ string) (Identity, error) {
		if reviews.Add(1) == 1 {
			close(asked)
		}
		<-released
		return Identity{"shop", "web"}, ctx.Err()
	})
	first, cancel := context.WithCancel(t.Context())
	var waiting sync.WaitGroup
	ask := func(ctx context.Context) {
		waiting.Go(func() {
			if got, err := tokens.Identity(ctx, "token"); err != nil || got.Namespace != "shop" {
				t.Errorf("%v, %v", got, err)
			}
		})
	}
	ask(first)
	<-asked
	cancel()
	for range 20 {
		ask(t.Context())
	}
	close(released)
	waiting.Wait()
	if n := reviews.Load(); n > 2 { // a request may come after the review
		t.Errorf("%d reviews", n)
	}
}

// The number of remembered tokens is bounded, and those that count are kept before others.
func TestTokensAreBounded(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	tokens := NewTokens(func(_ context.Context, token string) (Identity, error) {
		if token[0] == 'x' {
			return Identity{}, errors.New("refused")
		}
		return Identity{"shop", "web"}, nil
	})
	tokens.now = func() time.Time { return now }
	for i := range maxReviews - 10 {
		_, _ = tokens.Identity(t.Context(), fmt.Sprint("x", i)) // refused
	}
	if _, err := tokens.Identity(t.Context(), "good"); err != nil {
		t.Fatal(err)
	}
	now = now.Add(refusedFor + time.Second)
	for i := range 100 {
		_, _ = tokens.Identity(t.Context(), fmt.Sprint("x-more", i)) // refused
	}
	if n := len(tokens.answers); n > maxReviews {
		t.Errorf("%d tokens are remembered", n)
	}
	tokens.review = func(context.Context, string) (Identity, error) { return Identity{}, errors.New("asked again") }
	if _, err := tokens.Identity(t.Context(), "good"); err != nil {
		t.Error(err)
	}
}

// FuzzExpiry reads the end of arbitrary tokens.
func FuzzExpiry(f *testing.F) {
	f.Add(token("a", time.Unix(1_800_000_000, 0)))
	f.Add("a.e30.b")
	f.Add("a.eyJleHAiOjFlOTl9.b")
	f.Fuzz(func(t *testing.T, text string) {
		if end := expiry(text); !end.IsZero() && end.Unix() <= 0 {
			t.Errorf("%v", end)
		}
	})
}
