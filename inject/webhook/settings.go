package webhook

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/nametap/nametap/inject"
)

// readEvery is how often the file with the settings is read. kubelet updates the files of a ConfigMap
// once a minute.
const readEvery = time.Second

// settings are those of injection, as they last could be used.
type settings struct {
	file string // "" means that they never change
	log  *slog.Logger

	mu      sync.Mutex
	text    []byte // of cfg
	cfg     inject.Config
	problem string // why the file cannot be used; "" if it can
}

// newSettings reads the file.
func newSettings(file string, log *slog.Logger) (*settings, error) {
	s := &settings{file: file, log: log, cfg: inject.DefaultConfig()}
	if file == "" {
		return s, nil
	}
	text, cfg, err := s.read()
	if err != nil {
		return nil, err
	}
	s.text, s.cfg = text, cfg
	return s, nil
}

// current returns the settings.
func (s *settings) current() inject.Config {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cfg
}

// failing returns 1 while the file cannot be used, otherwise 0.
func (s *settings) failing() float64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.problem != "" {
		return 1
	}
	return 0
}

// read reads the file.
func (s *settings) read() (text []byte, cfg inject.Config, err error) {
	if text, err = os.ReadFile(s.file); err != nil {
		return nil, cfg, fmt.Errorf("settings of injection: %w (--inject-config)", err)
	}
	if cfg, err = inject.ParseConfig(text); err == nil {
		err = cfg.Check()
	}
	if err != nil {
		return nil, cfg, fmt.Errorf("settings of injection %q: %w (--inject-config)", s.file, err)
	}
	return text, cfg, nil
}

// follow keeps the settings in step with the file until ctx ends. While the file cannot be used, the
// previous settings stay.
func (s *settings) follow(ctx context.Context) {
	if s.file == "" {
		return
	}
	ticker := time.NewTicker(readEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			s.update(s.read())
		}
	}
}

// update takes the result of a reading.
func (s *settings) update(text []byte, cfg inject.Config, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		if s.problem != err.Error() {
			s.log.Error("the previous settings of injection stay in use", "error", err)
		}
		s.problem = err.Error()
		return
	}
	if s.problem != "" || !bytes.Equal(text, s.text) {
		s.log.Info("the settings of injection are in use", "file", s.file, "mode", cfg.Mode)
	}
	s.text, s.cfg, s.problem = text, cfg, ""
}
