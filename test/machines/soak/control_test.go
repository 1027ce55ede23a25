package soak

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"syscall"
	"time"

	"github.com/nametap/nametap/internal/clock"
)

// pushes writes a generation every second.
func (w *world) pushes(ctx context.Context) {
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if err := w.tables.push(); err != nil {
			w.tb.Errorf("writing a table: %v", err)
			return
		}
	}
}

// disturbControl restarts the control plane at random times. It is away for up to 8 s.
func (w *world) disturbControl(ctx context.Context, random *rand.Rand) {
	for clock.Sleep(ctx, between(random, 10*time.Second, 30*time.Second)) {
		signal := []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL}[random.IntN(2)]
		pause := between(random, 0, 8*time.Second)
		w.timeline.note(fmt.Sprintf("the control plane ends by %v and is away for %v", signal, pause))
		thaw := w.tables.freeze()
		w.control.restart(ctx, signal, pause)
		for !w.controlReady(ctx) && clock.Sleep(ctx, 200*time.Millisecond) {
		}
		thaw()
	}
}

// controlReady reports whether the control plane serves tables.
func (w *world) controlReady(ctx context.Context) bool {
	client := http.Client{Timeout: time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (conn net.Conn, err error) {
			w.network.Run(func() { conn, err = new(net.Dialer).DialContext(ctx, network, address) })
			return conn, err
		},
	}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+controlStatus+"/healthz/ready", nil)
	if err != nil {
		return false
	}
	response, err := client.Do(request)
	if err != nil {
		return false
	}
	_ = response.Body.Close() // it is not read
	return response.StatusCode == http.StatusOK
}

// between returns a random duration.
func between(random *rand.Rand, shortest, longest time.Duration) time.Duration {
	return shortest + time.Duration(random.Int64N(int64(longest-shortest)))
}
