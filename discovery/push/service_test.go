package push

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/discovery/hosts"
)

// newService returns a service without hosts, whose sources were read.
func newService() *Service {
	read := make(chan struct{})
	close(read)
	s := New(Config{
		Hosts: hosts.New("cluster.local", 1, hosts.NewVIPs()), FirstRead: read, MaxClients: 10, AckTimeout: time.Minute,
		Logger: slog.New(slog.DiscardHandler),
	})
	s.WaitFor("")
	return s
}

// D43: a stream that opens before the first reading waits for it instead of being refused, but
// not forever: the directory may be on a file system that does not answer.
func TestStreamWaitsForFirstReading(t *testing.T) {
	for name, read := range map[string]bool{"read": true, "not read": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, firstRead := newService(), make(chan struct{})
				s.cfg.FirstRead = firstRead
				served := make(chan struct{})
				go func() {
					err := s.serve(t.Context(), variantSotw, func() (request, error) {
						close(served)
						return request{}, context.Canceled
					}, nil)
					if err != context.Canceled { //nolint:errorlint // that of the function
						t.Error(err)
					}
				}()
				synctest.Wait()
				select {
				case <-served:
					t.Error("served before the first reading")
				default:
				}
				began := time.Now()
				if read {
					close(firstRead)
				}
				<-served
				if took := time.Since(began); (took == 0) != read {
					t.Errorf("served after %v", took)
				}
			})
		})
	}
}

// D33: a stream without a request does not occupy a place for long.
func TestSilentStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newService()
		began := time.Now()
		ended := make(chan struct{})
		err := s.serve(t.Context(), variantDelta, func() (request, error) {
			<-ended
			return request{}, context.Canceled
		}, nil)
		if status.Code(err) != codes.DeadlineExceeded || time.Since(began) > 2*time.Minute {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		close(ended)
		s.Wait()
		if n := s.clients.Load(); n != 0 {
			t.Errorf("%d clients are counted", n)
		}
	})
}

// D38: a client is not sent an older table than it has while it is not known that there is no later one. It is refused
// after a while.
func TestRevisionThatNeverComes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, began := newService(), time.Now()
		s.cfg.Behind = func(_ []byte, since time.Time) bool {
			if age := time.Since(since); age < 0 || age > catchUpWait {
				t.Errorf("the client is said to have waited for %v", age)
			}
			return true
		}
		if err := s.awaitRevision([]byte("later"), nil); status.Code(err) != codes.Unavailable {
			t.Errorf("the error is %v", err)
		}
		if took := time.Since(began); took != catchUpWait {
			t.Errorf("refused after %v, want %v", took, catchUpWait)
		}
		ended := make(chan struct{})
		time.AfterFunc(time.Second, func() { close(ended) })
		if err := s.awaitRevision([]byte("later"), ended); err != nil {
			t.Error(err)
		}
		if took := time.Since(began); took != catchUpWait+time.Second {
			t.Errorf("the end of the stream was noticed after %v", took-catchUpWait)
		}
		s.cfg.Behind = func(_ []byte, since time.Time) bool { return time.Since(since) < 3*time.Second }
		began = time.Now()
		if err := s.awaitRevision([]byte("later"), nil); err != nil || time.Since(began) != 3*time.Second {
			t.Errorf("%v after %v", err, time.Since(began))
		}
	})
}
